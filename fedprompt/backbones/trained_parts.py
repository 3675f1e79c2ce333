"""Parts of a model to train, in a copy of it: LoRA, adapters, norms and biases."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn as nn
from safetensors.torch import save_file
from torch import Tensor

import fedprompt._refusals as check
from fedprompt._random_streams import device_of
from fedprompt.backbones._models import classifier

_Model = TypeVar("_Model", bound=nn.Module)

_PROJECTIONS = ("qkv", "q_proj", "k_proj", "v_proj", "query", "key", "value")
_LAYERS_OF_MLPS = ("c_fc", "c_proj")  # of open_clip, whose attention has no linear layers


def lora(
    model: _Model, *, rank: int, generator: torch.Generator | None = None
) -> tuple[_Model, list[nn.Parameter]]:
    r"""Add LoRA to the query, key and value projections of all blocks, or to open_clip's MLPs.

    A projection W becomes :math:`W + B A`. A is drawn at random and B is zero, so the copy computes
    the same features at first. The product is not scaled, as with ``lora_alpha=rank`` in PEFT.

    It needs PEFT: ``pip install 'fedprompt[peft]'``. For other projections or options, call PEFT's
    ``inject_adapter_in_model`` yourself, and pass the parameters to :func:`vit_trunk`.

    Args:
        model: Model whose projections are linear layers with one of the names ``qkv``, ``q_proj``,
            ``k_proj``, ``v_proj``, ``query``, ``key`` and ``value``. Without any, as in open_clip,
            LoRA is in the layers ``c_fc`` and ``c_proj`` of MLPs. It is not changed.
        rank: Rank of the products (at least 1).
        generator: Generator of the initial values. If None, torch's global generator is used.

    Returns:
        Copy of the model, and its factors A and B.

    Raises:
        ValueError: If the model has LoRA already, or no such layers, as torchvision's models.
            :func:`vit_trunk` refuses models that read the weights of projections without calling
            them, so that LoRA would have no effect.

    Example:
        >>> from fedprompt import samples, vit_trunk
        >>> model, parameters = lora(samples.vit("S"), rank=2)
        >>> trunk = vit_trunk(model, trainable=parameters)
        >>> [name for name, _ in trunk.trainable.named_parameters()][:2]
        ['blocks.0.attn.qkv.lora_A.default.weight', 'blocks.0.attn.qkv.lora_B.default.weight']

    References:
        Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022.
    """
    check.module("model", model)
    check.count("rank", rank)
    device_of(generator)
    adapted = [name for name, _ in model.named_parameters() if ".lora_" in name]
    check.nothing(adapted, "model", "have no LoRA yet; merge it first")
    linear = [name for name, part in model.named_modules() if type(part) is nn.Linear]
    of = [
        [name for name in linear if name.split(".")[-1] in names]
        for names in (_PROJECTIONS, _LAYERS_OF_MLPS)
    ]
    found = of[0] or of[1]
    rule = f"have linear layers named {', '.join((*_PROJECTIONS, *_LAYERS_OF_MLPS))}"
    check.require(found, "model", rule, type(model).__name__)
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        message = "`fedprompt.tuning.lora` needs PEFT: pip install 'fedprompt[peft]'"
        raise ImportError(message) from error
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=found)
    with _drawing(generator):
        tuned: Any = inject_adapter_in_model(config, copy.deepcopy(model))
    weights = [weight for name, weight in tuned.named_parameters() if ".lora_" in name]
    return _trained(tuned, weights, "have linear layers")


def save_lora(model: nn.Module, path: str | PathLike[str], *, base_model: str = "") -> None:
    """Save the factors of a model of :func:`lora` as a folder that PEFT loads.

    ``PeftModel.from_pretrained(backbone, path)`` then computes the same features as `model`. Heads
    are not saved. The backbone is the frozen one, so save no LoRA of a method that changes its
    weights, such as FedEx-LoRA and FLoRA.

    Args:
        model: Model with LoRA, such as ``now.model(method, data).trunk.model`` of a method.
        path: Path of the folder, for ``adapter_config.json`` and ``adapter_model.safetensors``.
        base_model: Name of the backbone on the Hugging Face Hub, for PEFT's description.

    Raises:
        ValueError: If `model` has no LoRA.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from peft import PeftModel
        >>> from fedprompt import samples
        >>> model, _ = lora(samples.vit("S"), rank=2)
        >>> images = samples.digits().test_images[:2]
        >>> with TemporaryDirectory() as folder:
        ...     save_lora(model, folder)
        ...     loaded = PeftModel.from_pretrained(samples.vit("S"), folder)
        >>> torch.equal(loaded(images), model(images))
        True
    """
    check.module("model", model)
    check.text("base_model", base_model)
    if (config := getattr(model, "peft_config", {}).get("default")) is None:
        raise check.wrong("model", "have LoRA, as of `lora`", type(model).__name__)
    from peft import get_peft_model_state_dict

    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    described = copy.copy(config)
    described.base_model_name_or_path = base_model or None
    described.inference_mode = True
    described.save_pretrained(fspath(folder))
    factors = get_peft_model_state_dict(model).items()  # PEFT wraps a model twice
    named = {f"base_model.model.{name}": value.contiguous() for name, value in factors}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def adapters(
    model: _Model, *, width: int, generator: torch.Generator | None = None
) -> tuple[_Model, list[nn.Parameter]]:
    """Add a bottleneck of two linear layers and a GELU behind each MLP.

    The second layer is zero at first, so the copy computes the same features. PEFT has no such
    adapters, and is not needed.

    Args:
        model: Model whose blocks have a module named ``mlp``. It is not changed.
        width: Width of the bottleneck (at least 1).
        generator: Generator of the initial values. If None, torch's global generator is used.

    Returns:
        Copy of the model, and the parameters of its adapters.

    Raises:
        ValueError: If the model has no module named ``mlp`` with a linear layer.

    Example:
        >>> from fedprompt import samples, vit_trunk
        >>> model, parameters = adapters(samples.vit("S"), width=4)
        >>> trunk = vit_trunk(model, trainable=parameters)
        >>> [name for name, _ in trunk.trainable.named_parameters()][:2]
        ['blocks.0.mlp.adapter.0.weight', 'blocks.0.mlp.adapter.0.bias']

    References:
        Houlsby et al., "Parameter-Efficient Transfer Learning for NLP", ICML 2019. There is one
        adapter in a block here, in place of two.
    """
    check.module("model", model)
    check.count("width", width)
    device_of(generator)
    tuned = copy.deepcopy(model)
    parameters: list[nn.Parameter] = []
    with _drawing(generator):
        # Blocks may share an MLP, and have their own adapters.
        for block in [part for part in tuned.modules() if type(part) is not _Adapted]:
            mlp = dict(block.named_children()).get("mlp", nn.Identity())
            linear = next((part for part in mlp.modules() if isinstance(part, nn.Linear)), None)
            if linear is not None:
                block.mlp = adapted = _Adapted(mlp, linear.weight, width)
                parameters += adapted.adapter.parameters()
    return _trained(tuned, parameters, "have modules named mlp with linear layers")


def norms(model: _Model) -> tuple[_Model, list[nn.Parameter]]:
    """Train the scales and shifts of all normalization layers.

    Args:
        model: Model with normalization layers. It is not changed.

    Returns:
        Copy of the model, and the parameters of its normalization layers.

    Raises:
        ValueError: If the model has no normalization layer with parameters.

    Example:
        >>> from fedprompt import samples, vit_trunk
        >>> model, parameters = norms(samples.vit("S"))
        >>> trunk = vit_trunk(model, trainable=parameters)
        >>> [name for name, _ in trunk.trainable.named_parameters()][:2]
        ['blocks.0.norm1.weight', 'blocks.0.norm1.bias']
    """
    check.module("model", model)
    tuned = copy.deepcopy(model)
    layers = [part for part in tuned.modules() if "norm" in type(part).__name__.lower()]
    parameters = [parameter for layer in layers for parameter in layer.parameters(recurse=False)]
    return _trained(tuned, parameters, "have normalization layers")


def biases(model: _Model) -> tuple[_Model, list[nn.Parameter]]:
    """Train all biases, with the shifts of normalization layers.

    Args:
        model: Model with biases. The one of a classifier of timm or torchvision is left out,
            because features do not read it. The model is not changed.

    Returns:
        Copy of the model, and its biases.

    Raises:
        ValueError: If the model has no parameter whose name ends with "bias".

    Example:
        >>> from fedprompt import samples, vit_trunk
        >>> model, parameters = biases(samples.vit("S"))
        >>> trunk = vit_trunk(model, trainable=parameters)
        >>> [name for name, _ in trunk.trainable.named_parameters()][:2]
        ['patch_embed.proj.bias', 'blocks.0.norm1.bias']

    References:
        Ben Zaken et al., "BitFit: Simple Parameter-efficient Fine-tuning for Transformer-based
        Masked Language-models", ACL 2022.
    """
    check.module("model", model)
    tuned = copy.deepcopy(model)
    own = {parameter for head in classifier(tuned) for parameter in head.parameters()}
    named = tuned.named_parameters()
    parameters = [bias for name, bias in named if name.endswith("bias") and bias not in own]
    return _trained(tuned, parameters, "have parameters named bias")


class _Adapted(nn.Module):
    """An MLP with a bottleneck behind it, and a connection that skips the bottleneck."""

    def __init__(self, mlp: nn.Module, like: Tensor, width: int) -> None:
        super().__init__()
        self.mlp = mlp
        dim = like.shape[1]
        self.adapter = nn.Sequential(nn.Linear(dim, width), nn.GELU(), nn.Linear(width, dim))
        for parameter in self.adapter[2].parameters():
            nn.init.zeros_(parameter)
        self.adapter.to(like)

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        tokens: Tensor = self.mlp(*inputs, **options)
        return torch.add(tokens, self.adapter(tokens))


def _trained(model: Any, chosen: list[nn.Parameter], rule: str) -> tuple[Any, list[nn.Parameter]]:
    """Freeze all parameters except the chosen ones, of which there must be one."""
    check.require(chosen, "model", rule, type(model).__name__)
    model.requires_grad_(False)
    for parameter in chosen:
        parameter.requires_grad_()
    return model, chosen


@contextmanager
def _drawing(generator: torch.Generator | None) -> Iterator[None]:
    """Draw initial values on the CPU, by the generator if it is given."""
    with torch.random.fork_rng(devices=[], enabled=generator is not None), torch.device("cpu"):
        if generator is not None:
            seed = torch.randint(2**62, (), generator=generator, device=generator.device)
            torch.default_generator.manual_seed(int(seed))
        yield
