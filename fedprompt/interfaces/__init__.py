"""Nouns and protocols: the values that components exchange, and the types of the components.

A component is a function, an ``nn.Module`` that owns parameters, or an ``(init, step)`` pair that
remembers something between rounds. The protocols are the types of functions and pairs. Your own
piece can replace one of the library wherever it fits the protocol. Nothing here computes.
"""

from fedprompt.interfaces.method import Method, Round, Server, State
from fedprompt.interfaces.nouns import (
    ClassNames,
    Coupling,
    Encoded,
    Message,
    Payload,
    PromptedText,
    PromptStream,
    Selection,
    Weighted,
)
from fedprompt.interfaces.protocols import (
    Aggregator,
    Codec,
    ContextLearner,
    GuideDerivative,
    GuideLoss,
    GuideUpdate,
    PatchMatcher,
    PromptInjector,
    PromptSelector,
    ResumableTrunk,
    ServerRule,
    ServerUpdate,
    TextEncoder,
    TrainableTrunk,
    TransportScore,
    TransportSolver,
    Trunk,
)

__all__ = [
    "Aggregator",
    "ClassNames",
    "Codec",
    "ContextLearner",
    "Coupling",
    "Encoded",
    "GuideDerivative",
    "GuideLoss",
    "GuideUpdate",
    "Message",
    "Method",
    "PatchMatcher",
    "Payload",
    "PromptInjector",
    "PromptSelector",
    "PromptStream",
    "PromptedText",
    "ResumableTrunk",
    "Round",
    "Selection",
    "Server",
    "ServerRule",
    "ServerUpdate",
    "State",
    "TextEncoder",
    "TrainableTrunk",
    "TransportScore",
    "TransportSolver",
    "Trunk",
    "Weighted",
]
