"""Composable pieces for federated prompt tuning in PyTorch. The loop stays yours."""

from fedprompt import plots as plots
from fedprompt.aggregation import *
from fedprompt.backbones import *
from fedprompt.data import *
from fedprompt.distillation import *
from fedprompt.exchange import *
from fedprompt.features import *
from fedprompt.freezing import *
from fedprompt.guidance import *
from fedprompt.interfaces import *
from fedprompt.matching import *
from fedprompt.metrics import *
from fedprompt.privacy import *
from fedprompt.prompts import *
from fedprompt.selection import *
from fedprompt.transport import *
