"""The losses, one family in one file each: recipe keys, tensor code and formula. Also the critic's loss."""

from fourfold.algorithm.losses.base import LOSSES as LOSSES
from fourfold.algorithm.losses.base import AnyLoss as AnyLoss
from fourfold.algorithm.losses.base import Loss as Loss
from fourfold.algorithm.losses.base import LossInputs as LossInputs
from fourfold.algorithm.losses.base import PolicyLoss as PolicyLoss
from fourfold.algorithm.losses.base import TokenLoss as TokenLoss
from fourfold.algorithm.losses.bradley_terry import BradleyTerryLoss as BradleyTerryLoss
from fourfold.algorithm.losses.cispo import CispoLoss as CispoLoss
from fourfold.algorithm.losses.dpo import DpoLoss as DpoLoss
from fourfold.algorithm.losses.dppo import DppoLoss as DppoLoss
from fourfold.algorithm.losses.gmpo import GmpoLoss as GmpoLoss
from fourfold.algorithm.losses.gspo import GspoLoss as GspoLoss
from fourfold.algorithm.losses.kto import KtoLoss as KtoLoss
from fourfold.algorithm.losses.likelihood import DftLoss as DftLoss
from fourfold.algorithm.losses.likelihood import NllLoss as NllLoss
from fourfold.algorithm.losses.ppo import PpoLoss as PpoLoss
from fourfold.algorithm.losses.reference_free import CpoLoss as CpoLoss
from fourfold.algorithm.losses.reference_free import OrpoLoss as OrpoLoss
from fourfold.algorithm.losses.reference_free import SimpoLoss as SimpoLoss
from fourfold.algorithm.losses.reinforce import ReinforceLoss as ReinforceLoss
from fourfold.algorithm.losses.sapo import SapoLoss as SapoLoss
from fourfold.algorithm.losses.units import SampleInputs as SampleInputs
from fourfold.algorithm.losses.units import SampleLoss as SampleLoss
from fourfold.algorithm.losses.units import UnitLoss as UnitLoss
from fourfold.algorithm.losses.value import value_loss as value_loss
from fourfold.algorithm.losses.vespo import VespoLoss as VespoLoss
