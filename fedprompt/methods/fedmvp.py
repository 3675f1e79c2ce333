"""A shared network makes visual prompts for each image from its patches and sentences of classes.

Patch embeddings attend to the projected features of the attributes, which are several sentences
about each class. A gated feed-forward layer follows, and the mean of each part of the patches is a
prompt before the first layer. Logits are mean cosines to the attributes of a class. A second loss
keeps image features near those of the frozen CLIP for the mirrored images. Singha et al., "FedMVP:
Federated Multimodal Visual Prompt Tuning for Vision-Language Models", ICCV 2025.

Up: the network, F V + 16 V² + 20 V numbers, for text features of width F and images of width V.
Down: the network.

Deviations: the full text of the paper was not available, only its abstract and summaries that quote
its attention. Norms, the residual of the feed-forward layer and the weight of the second loss are
those of the authors' code. The code imports a missing file and never sets its image encoder, so it
does not run. It takes one step in a round, on the last batch; here each batch is a step. It changes
to LoRA of the attention when a loss is below 0.5, of which the quoted equations say nothing; here
the whole network is trained. As in the code, every client counts once, and trains with its own
classes alone. There are T prompts, in place of four. Without `attributes` of the setting, a class
has one sentence, its template.

Compared: mainaksingha01/FedMVP 246800e, `model/FedMVP.py` with its image encoder set, with the
deviations above, float64, largest difference 3.8e-15 (2026-11).
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

import fedprompt as fp
from fedprompt.methods.fedmaple import LayeredClip
from fedprompt.methods.models import ClipSetting
from fedprompt.methods.registry import register
from fedprompt.methods.steps import averaged, take_step


class _PromptFormer(nn.Module):
    """Cross-attention of patches to attributes, with a gated feed-forward layer."""

    def __init__(self, text_dim: int, dim: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.project = nn.Linear(text_dim, dim)
        self.query_norm = nn.LayerNorm(dim)
        self.key_norm = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.widen = nn.Linear(dim, 8 * dim)
        self.narrow = nn.Linear(4 * dim, dim)

    def forward(
        self, patches: Float[Tensor, "batch patches dim"], text: Float[Tensor, "sentences width"]
    ) -> Float[Tensor, "batch prompts dim"]:
        """Make the prompts of each image."""
        keys = self.project(text).expand(len(patches), -1, -1)
        mixed, _ = self.attention(self.query_norm(patches), self.key_norm(keys), keys)
        values, gates = self.widen(self.norm(mixed)).chunk(2, dim=-1)
        mixed = mixed + self.narrow(values * F.gelu(gates))
        return F.adaptive_avg_pool1d(mixed.mT, self.count).mT


class _Multimodal(LayeredClip):
    """Classifier of images whose prompts are made from patches and attributes."""

    def __init__(self, setting: ClipSetting) -> None:
        super().__init__(setting)
        sentences = setting.attribute_text()
        self.text, self.counts = torch.cat(sentences), torch.tensor([*map(len, sentences)])
        sizes = self.text.shape[1], self.trunk.dim, setting.length
        self.network = setting.seeded(_PromptFormer, *sizes)

    def sentences(self) -> list[Tensor]:
        """Return the text features of the sentences of each class."""
        return list(self.text.split(self.counts.tolist()))

    def features(
        self, images: Tensor, sentences: list[Tensor]
    ) -> tuple[Float[Tensor, "batch dim"], Float[Tensor, "classes dim"]]:
        """Encode images, normalized, and average the sentences of each class."""
        visual = self.trunk.model
        patches = visual.conv1(images.to(visual.conv1.weight.dtype)).flatten(2).mT
        patches = patches + visual.positional_embedding[1:]
        prompts = self.network(patches, torch.cat(sentences))
        image = F.normalize(self.encode_images(images, {0: prompts}), dim=-1)
        return image, torch.stack([each.mean(0) for each in sentences])

    def forward(self, images: Tensor) -> Float[Tensor, "batch classes"]:
        """Classify images into all classes."""
        image, text = self.features(images, self.sentences())
        return self.scale * image @ text.T

    def loss(
        self, images: Tensor, labels: Tensor, present: Int[Tensor, "present"], mirrored: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy among some classes, and the distance to the frozen CLIP."""
        sentences = self.sentences()
        image, text = self.features(images, [sentences[label] for label in present])
        with torch.no_grad():
            frozen = fp.encode_prompted(self.trunk, mirrored).pooled
        logits = self.scale * image @ text.T
        distance = 1 - F.cosine_similarity(image, frozen).mean()
        return F.cross_entropy(logits, torch.searchsorted(present, labels)), distance


@register(
    "FedMVP",
    families=("CLIP",),
    search={"learning_rate": (3e-4, 3e-2), "consistency_weight": (0.1, 10.0)},
    inputs="images",
)
def fedmvp(
    setting: ClipSetting, *, learning_rate: float = 3e-3, consistency_weight: float = 10.0
) -> fp.Method:
    """FedMVP."""
    model = _Multimodal(setting)

    def train(data, answer, state):
        fp.load_values(model, answer)
        optimizer = data.optimizer(model, learning_rate)
        present = data.class_counts.nonzero().flatten()
        draw = data.stream("mirror")
        for images, labels in data.batches():
            mirror = torch.rand((), generator=draw, device="cpu") < 0.5
            mirrored = images.flip(-1) if mirror else images
            entropy, distance = model.loss(images, labels, present, mirrored)
            take_step(optimizer, entropy + consistency_weight * distance)
        return fp.collect(model, weight=1.0), state

    return averaged(model, train)
