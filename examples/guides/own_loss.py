"""A loss of one's own and an algorithm of it, as a plugin offers them (its manifest says `hooks = "pkg.own_loss"`)."""

from jackfield.algorithms import Algorithm
from jackfield.plugins import hookimpl


def anchored(log_probs, advantages, ref_log_probs, *, strength=0.1):
    """-A log pi + strength / 2 (log pi - log pi_ref)^2."""
    distance = log_probs - ref_log_probs
    losses = -advantages * log_probs + 0.5 * strength * distance.square()
    return losses, {"policy/distance": distance.detach().abs()}


def anchored_policy_gradient():
    """a leave-one-out baseline, and a policy gradient that stays near the reference."""
    return Algorithm(loss="anchored", advantages="rloo", loss_options={"strength": 0.2})


@hookimpl
def register_parts(register):
    register("loss", "anchored", anchored, scope="token")
    register("algorithm", "anchored_policy_gradient", anchored_policy_gradient)
