"""Configures a run by a recipe, a TOML file: `load` reads and checks it, `dump` writes it back.

This list is for callers that read recipes. The loop and the step import a table from the module that defines it.
"""

from fourfold.config.agents import AgentsConfig as AgentsConfig
from fourfold.config.algorithm import PRESETS as PRESETS
from fourfold.config.algorithm import AlgorithmConfig as AlgorithmConfig
from fourfold.config.layers import add_set_option as add_set_option
from fourfold.config.placement import gpu_count as gpu_count
from fourfold.config.placement import gpu_places as gpu_places
from fourfold.config.recipe import dump as dump
from fourfold.config.recipe import fix_date as fix_date
from fourfold.config.recipe import flatten as flatten
from fourfold.config.recipe import from_tables as from_tables
from fourfold.config.recipe import load as load
from fourfold.config.recipe import locate as locate
from fourfold.config.recipe import toml_value as toml_value
from fourfold.config.recipe import with_date as with_date
from fourfold.config.reward import RewardConfig as RewardConfig
from fourfold.config.rollout import RolloutPool as RolloutPool
from fourfold.config.schema import Config as Config
from fourfold.config.schema import CurriculumConfig as CurriculumConfig
from fourfold.config.schema import DataConfig as DataConfig
from fourfold.config.schema import SecurityConfig as SecurityConfig
from fourfold.config.sources import DataSourceConfig as DataSourceConfig
from fourfold.config.sources import EvalSet as EvalSet
from fourfold.config.sources import TrainSourceConfig as TrainSourceConfig
from fourfold.config.sources import block_counts as block_counts
from fourfold.config.sources import parse_template as parse_template
from fourfold.config.trainer import CriticConfig as CriticConfig
from fourfold.config.trainer import LoraConfig as LoraConfig
from fourfold.config.trainer import TrainerConfig as TrainerConfig
