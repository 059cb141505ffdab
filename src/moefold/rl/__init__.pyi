from moefold.rl.engine import Engine as Engine
from moefold.rl.logprob_match import MatchReport as MatchReport
from moefold.rl.logprob_match import compare_logprobs as compare_logprobs
from moefold.rl.policy_losses import group_advantages as group_advantages
from moefold.rl.rollouts import Rollout as Rollout
from moefold.rl.weight_transport import receive_weights as receive_weights
from moefold.rl.weight_transport import send_weights as send_weights
