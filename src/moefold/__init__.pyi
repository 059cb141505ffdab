from moefold.api.local_models import LanguageModel as LanguageModel
from moefold.api.local_models import MoELayer as MoELayer
from moefold.api.local_models import build_model as build_model
from moefold.api.plans import Plan as Plan
from moefold.api.plans import plan as plan
from moefold.api.proofs import prove as prove
from moefold.api.runs import check as check
from moefold.api.runs import load_run as load_run
from moefold.config.run import RunConfig as RunConfig
from moefold.errors import MoefoldError as MoefoldError
from moefold.errors import Problem as Problem
from moefold.moe.routing_policies import RoutingPolicy as RoutingPolicy
from moefold.moe.routing_policies import TopKAssignment as TopKAssignment
from moefold.prove.verdict import Verdict as Verdict
from moefold.train.callback import Callback as Callback
from moefold.train.callback import Control as Control
from moefold.train.callback import Evaluation as Evaluation
from moefold.train.callback import RunInfo as RunInfo
from moefold.train.callback import StepRecord as StepRecord
from moefold.train.trainer import Trainer as Trainer

__version__: str
__all__: list[str]
