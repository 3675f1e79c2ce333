"""Run the quickstart of the README, and draw its clients and its result.

The lines between the comments are those of the README. The landing page includes them from here.
"""

# fmt: off
import torch
import fedprompt as fp
from fedprompt import samples

torch.set_num_threads(1)  # the network is tiny: more threads only wait for one another
images, labels, test_images, test_labels = samples.digits()
shards = fp.data.dirichlet(labels, 5, alpha=1.0, generator=torch.manual_seed(0))
trunk = fp.vit_trunk(samples.vit("B"))  # a small frozen vision transformer
prompts, head = fp.DeepPrompts(8, trunk), torch.nn.Linear(trunk.dim, 10)
model = torch.nn.ModuleDict({"prompts": prompts, "head": head})

def predict(batch):
    return head(fp.encode_prompted(trunk, batch, prompts()).pooled)

for server_round in range(4):
    values, payloads = fp.snapshot(model), []
    for shard in map(torch.as_tensor, shards):  # one shard for each of five clients
        fp.load_values(model, values)  # a client starts from the server's values
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for batch in shard[torch.randperm(len(shard))].split(32):
            optimizer.zero_grad()
            loss = torch.nn.CrossEntropyLoss()(predict(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
        payloads.append(fp.collect(model, weight=len(shard)))
    fp.load_values(model, fp.weighted_mean(payloads))

accuracy = (predict(test_images).argmax(1) == test_labels).float().mean()
print(f"accuracy {accuracy:.0%}, {fp.num_bytes(payloads[0]):,} bytes from a client")
# fmt: on

try:
    from matplotlib.figure import Figure
except ImportError:
    print("For the picture: pip install 'fedprompt[plots]'")
else:
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    fp.plots.partition(labels, shards, axes=left)
    left.set(title="Each color is a digit: clients have different ones")
    correct = (predict(test_images).argmax(1) == test_labels).float()
    shares = fp.class_means(correct, test_labels, num_classes=10).value
    right.bar(range(10), (100 * shares).tolist(), tick_label=range(10))
    right.set(
        title="The mean of their prompts recognizes all", xlabel="digit", ylabel="accuracy in %"
    )
    figure.savefig("quickstart.png", dpi=120)
    print("Picture: quickstart.png")
