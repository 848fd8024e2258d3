"""The advantage estimators, one class each: recipe keys, computation and formula."""

from fourfold.algorithm.advantages.base import ADVANTAGES as ADVANTAGES
from fourfold.algorithm.advantages.base import AdvantageEstimator as AdvantageEstimator
from fourfold.algorithm.advantages.base import AnyAdvantage as AnyAdvantage
from fourfold.algorithm.advantages.base import GroupEstimator as GroupEstimator
from fourfold.algorithm.advantages.base import ScoredSamples as ScoredSamples
from fourfold.algorithm.advantages.base import factor as factor
from fourfold.algorithm.advantages.base import group_members as group_members
from fourfold.algorithm.advantages.constant import Constant as Constant
from fourfold.algorithm.advantages.distillation import Distillation as Distillation
from fourfold.algorithm.advantages.gae import Gae as Gae
from fourfold.algorithm.advantages.gdpo import Gdpo as Gdpo
from fourfold.algorithm.advantages.group_baselines import DrGrpo as DrGrpo
from fourfold.algorithm.advantages.group_baselines import Gpg as Gpg
from fourfold.algorithm.advantages.group_baselines import MaxRl as MaxRl
from fourfold.algorithm.advantages.group_baselines import Opo as Opo
from fourfold.algorithm.advantages.group_baselines import ReinforceBaseline as ReinforceBaseline
from fourfold.algorithm.advantages.group_baselines import Rloo as Rloo
from fourfold.algorithm.advantages.grpo import Grpo as Grpo
from fourfold.algorithm.advantages.grpo import GrpoLeaveOneOut as GrpoLeaveOneOut
from fourfold.algorithm.advantages.otb import OptimalTokenBaseline as OptimalTokenBaseline
from fourfold.algorithm.advantages.pass_at_k import PassAtK as PassAtK
from fourfold.algorithm.advantages.reinforce import Reinforce as Reinforce
from fourfold.algorithm.advantages.remax import Remax as Remax
from fourfold.algorithm.advantages.turn_grpo import TurnGrpo as TurnGrpo
