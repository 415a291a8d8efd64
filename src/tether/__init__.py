"""tether: RLHF with a KL budget.

One step, in the order in which `tether.train.train_step` runs it:

1. prompts      -> a batch of prompts                                 data.prompts.step_prompts
2. rollout      -> sampled responses, log-probs, values               rollout.collect_rollout
3. scores       -> one number per response, before any KL             rewards.score
4. KL           -> exact KL(π‖π_ref) and reference log-probs          rollout.measure_kl
5. rewards      -> scores shaped by −β(log π − log π_ref) per token   core.shaping.shape_rewards
6. advantages   -> GAE, whitened over the whole batch                 core.advantages.gae
7. update       -> clipped policy loss and value loss                 update.update_policy
8. controller   -> β for the next step from the measured KL           core.controllers
9. ledger       -> nats spent against reward gained; metrics; report  core.ledger
"""

__version__ = "0.1.0"
