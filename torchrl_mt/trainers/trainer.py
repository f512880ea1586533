"""A trainer of language models on multi-turn episodes, on TorchRL's ``Trainer``.

It makes the parts that a loop of your own would make, each under a name: policy, collector, maker, loss
module, log and checkpoint. A run that was killed at any moment goes on as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.trainers import DefaultOptimizationStepper, Trainer
from transformers import PreTrainedModel

from torchrl_mt import pretrained
from torchrl_mt.checks import check_at_least, check_positive_integer
from torchrl_mt.collectors import CollectorOptions, Limits, MultiTurnCollector
from torchrl_mt.collectors.playing.env_factory import is_reward, misfit
from torchrl_mt.datasets import RunCheckpoint, TrainedWeights
from torchrl_mt.engines import TransformersEngine
from torchrl_mt.envs import ToolEnv
from torchrl_mt.json_lines import to_json
from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss, Passes
from torchrl_mt.pretrained import Pretrained
from torchrl_mt.transforms import MergeTurns
from torchrl_mt.view import RunLog, check_run, plot_run, write_report
from torchrl_mt.view.run_files import METRICS, read_run

__all__ = ["MultiTurnTrainer"]

_CONFIG = ("episodes_per_batch", "group_size", "num_epochs", "optim_steps_per_batch", "seed", "lr")
"""Arguments that are logged, and that a run which goes on must have as at its begin."""


class _Stepper(DefaultOptimizationStepper):
    """Keeps the losses of each step, as ``Trainer`` averages those of the last epoch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[TensorDictBase] = []

    def step(self, trainer: Trainer, sub_batch: TensorDictBase) -> TensorDictBase:
        losses = super().step(trainer, sub_batch)
        self.losses.append(losses.detach())
        return losses


class MultiTurnTrainer(Trainer):
    r"""Train a chat model on whole episodes: play, learn, send the new weights, log, save.

    :meth:`train` evaluates the model before and after. The folder gets the log of the run, pages with
    episodes of evaluations and of training, curves, checkpoints, and at the end the trained model.

    Args:
        model: A name on the Hugging Face Hub, a folder, a loaded model, or what
            :func:`torchrl_mt.pretrained.load` returned.
        task: What plays an episode: an environment, a workflow or an agent, as for
            :class:`~torchrl_mt.collectors.MultiTurnCollector`. Or a reward function, called with the
            messages and the item, for one answer to the item's ``"messages"``.
        data: The items to play, as for the collector. Without data, items are ``{"seed": k}``.
        folder: Folder of the run.
        eval_data: Items of the evaluations, which training should not have; none are made without.
        eval_kwargs: Arguments of the collector's ``evaluate``: ``{"n": 4}`` plays each item four times,
            ``{"temperature": 0.0}`` the likeliest answers. By default once, sampled as in training.
        eval_every: Updates between two evaluations; 0 evaluates only before and after.
        updates: Number of updates.
        episodes_per_batch: Episodes of an update.
        group_size: Episodes that share an item.
        num_epochs: Times that the rows of an update are learned from.
        optim_steps_per_batch: Optimizer steps of an epoch: its rows are shuffled and split into so many.
        advantage: Kind of advantage, as for :class:`~torchrl_mt.objectives.ExperienceMaker`.
        gamma: Discount, likewise.
        objective: Objective, as for :class:`~torchrl_mt.objectives.MultiTurnLoss`.
        critic: A value network, trained with the model, for ``advantage="gae"``.
        limits: Limits of an episode, or a mapping of them. A reward function also judges answers that
            ``max_response_tokens`` cut, unless this says ``on_cut="end"``.
        sampling: Sampling parameters, such as ``{"temperature": 1.0, "stop": ["\n"]}``.
        passes: How rows are cut into forward passes, or a mapping of it, with the temperature of
            ``sampling``.
        lora: Train LoRA adapters, as for :func:`torchrl_mt.pretrained.load`.
        lr: Learning rate of a model that is not loaded yet; by default as suits the model.
        clip_norm: Largest norm of the gradient.
        save_every: Updates between two checkpoints; 0 saves none.
        resume: Go on with the run in ``folder``, if there is one.
        seed: Seed of the adapters, the order of items, sampling and shuffling.
        device: Where the model goes.
        loggers: Loggers beside the folder's own log, as for :class:`~torchrl_mt.view.RunLog`.
        collector_kwargs: Further arguments of the collector.
        maker_kwargs: Further arguments of the maker.
        loss_kwargs: Further arguments of the loss module.

    Raises:
        FileExistsError: If ``folder`` has a run and ``resume`` is false.
        TypeError, ValueError: If an argument has a wrong type or value.

    Examples:
        >>> import tempfile, torchrl_mt as mt
        >>> model, tokenizer = mt.testing.tiny_chat_model("yes no")
        >>> policy = mt.pretrained.load(model, tokenizer, lora=False, lr=1e-3)  # doctest: +ELLIPSIS
        Llama...
        >>> def reward(messages, item):
        ...     return float("yes" in messages[-1]["content"])
        >>> items = [{"messages": [{"role": "user", "content": "yes no"}]}]
        >>> trainer = mt.trainers.MultiTurnTrainer(
        ...     policy, reward, items, folder=tempfile.mkdtemp(), eval_data=items, updates=2,
        ...     episodes_per_batch=4, limits={"max_response_tokens": 4})
        >>> sorted(trainer.train())  # doctest: +ELLIPSIS
        evaluation ... -> ...
        ['after', 'before']
    """

    def __init__(
        self,
        model: str | PreTrainedModel | Pretrained,
        task: Any,
        data: Any = None,
        *,
        folder: str | Path,
        eval_data: Iterable[Any] | None = None,
        eval_kwargs: Mapping[str, Any] | None = None,
        eval_every: int = 0,
        updates: int = 20,
        episodes_per_batch: int = 32,
        group_size: int = 1,
        num_epochs: int = 1,
        optim_steps_per_batch: int = 1,
        advantage: Any = "turn",
        gamma: float | None = None,
        objective: Any = "ppo",
        critic: nn.Module | None = None,
        limits: Limits | Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        passes: Passes | Mapping[str, Any] | None = None,
        lora: bool | Any = True,
        lr: float | None = None,
        clip_norm: float = 1.0,
        save_every: int = 1,
        resume: bool = False,
        seed: int = 0,
        device: str | torch.device | None = None,
        loggers: Sequence[Any] = ("csv",),
        collector_kwargs: Mapping[str, Any] | None = None,
        maker_kwargs: Mapping[str, Any] | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        config = {name: value for name, value in locals().items() if name in _CONFIG}
        check_positive_integer("updates", updates)
        check_positive_integer("num_epochs", num_epochs)
        check_positive_integer("optim_steps_per_batch", optim_steps_per_batch)
        check_at_least("eval_every", eval_every, 0)
        check_at_least("save_every", save_every, 0)
        if eval_every and eval_data is None:
            raise ValueError(f"eval_every needs eval_data, got eval_every={eval_every} without.")
        self.folder = Path(folder).expanduser()
        self._check_folder(resume, config)
        self.eval_every, self.updates, self.save_every = eval_every, updates, save_every
        self.eval_data = None if eval_data is None else list(eval_data)
        self.eval_kwargs = dict(eval_kwargs or {})
        if self.eval_data == []:
            raise ValueError("eval_data must have at least one item, got none.")
        torch.manual_seed(seed)
        if not isinstance(model, Pretrained):
            model = pretrained.load(model, lora=lora, lr=lr, device=device)
        elif lr is not None or device is not None:
            raise ValueError(f"lr and device are for pretrained.load, got {lr=} and {device=}.")
        self.policy = model
        config["lr"] = model.optimizer.param_groups[0]["lr"]
        judged = {}
        _check_function(task)
        if is_reward(task):
            task, judged = ToolEnv([], reward=task), {"on_cut": "continue"}
        if limits is None or isinstance(limits, Mapping):
            limits = Limits(**{**judged, **(limits or {})})
        collector = MultiTurnCollector(
            task,
            TransformersEngine(model.model, model.tokenizer),
            data,
            **{
                "episodes_per_batch": episodes_per_batch,
                "group_size": group_size,
                "total_episodes": updates * episodes_per_batch,
                "limits": limits,
                "sampling": {"seed": seed, **(sampling or {})},
                "postproc": MergeTurns(pad_token_id=model.tokenizer.pad_token_id),
                "options": CollectorOptions(seed=seed),
                **(collector_kwargs or {}),
            },
        )
        if not isinstance(passes, Passes):
            temperature = (sampling or {}).get("temperature", 1.0)
            passes = Passes(**{"temperature": temperature, **(passes or {})})
        both = {"critic": critic, "passes": passes}
        experience = {"advantage": advantage, "gamma": gamma, **both, **(maker_kwargs or {})}
        loss = {"objective": objective, **both, **(loss_kwargs or {})}
        self.maker = ExperienceMaker(model.model, **experience)
        super().__init__(
            collector=collector,
            total_frames=2**62,  # the collector ends the run
            frame_skip=1,
            num_epochs=num_epochs,
            optim_steps_per_batch=optim_steps_per_batch,
            loss_module=MultiTurnLoss(model.model, **loss),
            optimizer=model.optimizer,
            optimization_stepper=_Stepper(),
            clip_norm=clip_norm,
            progress_bar=False,
            auto_log_optim_steps=False,  # the log is the folder's
        )
        if critic is not None:
            own = [p for p in critic.parameters() if p.requires_grad]
            model.optimizer.add_param_group({"params": own})
        self.run_log = RunLog(
            self.folder,
            loggers,
            config=config,
            episodes_every=min(10, updates),
            total_steps=updates,
            progress=True,
        )
        self.run_checkpoint = RunCheckpoint(self.folder / "checkpoints")
        self.done = {"updates": 0, "frames": 0, "optim_steps": 0}
        self.results = dict[str, float]()
        self.extra_parts = dict[str, Any]()
        """Further parts of a checkpoint, such as a scheduler: they have a ``state_dict``."""
        self._rows: TensorDictBase | None = None
        self._minibatches: Iterator[TensorDictBase] = iter(())
        self._metrics: list[Any] = []
        self.register_op("batch_process", self._make_experience)
        self.register_op("pre_epoch", self._shuffle)
        self.register_op("process_optim_batch", lambda batch: next(self._minibatches))
        self.register_op("post_optim_complete_log", self._keep_losses)
        self.register_op("post_steps", self._finish_update)
        self.register_op("shutdown", self._finish_run)

    def _check_folder(self, resume: bool, config: Mapping[str, Any]) -> None:
        """Refuse a folder with a run, unless it is this one and is to go on."""
        if not any((self.folder / name).exists() for name in (METRICS, "checkpoints")):
            return
        if not resume:
            raise FileExistsError(
                f"folder must be new, got {self.folder}, which has a run: give resume=True to go on "
                "with it, or another folder."
            )
        began = read_run(self.folder).facts["config"] or {}
        for name, value in to_json(config).items():
            if value is not None and began.get(name, value) != value:
                raise ValueError(
                    f"{name} must be {began[name]!r} as in the run in {self.folder}, got {value!r}."
                )

    @property
    def parts(self) -> dict[str, Any]:
        """What a checkpoint has, by name: also ``extra_parts``."""
        parts = {"trained": TrainedWeights(self.loss_module), "optimizer": self.optimizer}
        parts |= {"maker": TrainedWeights(self.maker), "collector": self.collector}
        return parts | {"done": self.done, "results": self.results} | self.extra_parts

    def train(self) -> dict[str, float]:
        """Run the updates that are left. To go on after an error, make a new trainer with ``resume``.

        Returns:
            ``"before"`` and ``"after"``: the mean reward of an episode in the evaluations, if there is
            ``eval_data``. ``"nll_before"`` and ``"nll_after"``: nats per token of plain text
            (:meth:`torchrl_mt.pretrained.Pretrained.plain_text_nll`), if the tokenizer knows its words.
        """
        with self.run_log, self.collector:
            if self.run_checkpoint.restore(**self.parts) is None:
                self._evaluate("before")
            if self.done["updates"] > self.updates:
                made = f"{self.done['updates']}, which the run in {self.folder} has made"
                raise ValueError(f"updates must be at least {made}, got {self.updates}.")
            self.collected_frames, self._optim_count = self.done["frames"], self.done["optim_steps"]
            if self.done["updates"] < self.updates:
                super().train()
            else:
                self._shutdown_hook()
        return self.results

    def _make_experience(self, rows: TensorDictBase) -> TensorDictBase:
        stats = self.collector.stats()  # which count the evaluations of this process alone
        stats = {name: value for name, value in stats.items() if not name.startswith("eval/")}
        reward = rows["rewards", "full"].sum().item() / len(rows["episode"].unique())
        self._rows = rows = self.maker(rows)
        self._metrics = [stats, self.maker.metrics, {"reward": reward}]
        return rows

    def _shuffle(self, rows: TensorDictBase) -> TensorDictBase:
        parts = self.optim_steps_per_batch
        order = (torch.randperm if parts > 1 else torch.arange)(len(rows), device="cpu")
        self._minibatches = (rows[part] for part in order.tensor_split(parts) if len(part))
        return rows

    def _keep_losses(self, optim_steps: int, last_epoch: TensorDictBase | None) -> None:
        losses, self.optimization_stepper.losses = self.optimization_stepper.losses, []
        if losses:
            self._metrics.append(torch.stack(losses).mean(0))
            if "approx_kl" in losses[0]:  # not with an objective that imitates
                self._metrics.append({"approx_kl/first_step": losses[0]["approx_kl"]})

    def _finish_update(self) -> None:
        self.collector.update_policy_weights_(self.policy.model)
        update = self.done["updates"] + 1
        self.done |= {"updates": update, "frames": self.collected_frames}
        self.done["optim_steps"] = self._optim_count
        if self.eval_every and update % self.eval_every == 0 and update < self.updates:
            self._metrics.append({"eval/reward": self._play()[0]})
        self.run_log.log(update, *self._metrics)
        self.run_log.episodes(update, self._rows, self.policy.tokenizer)
        if self.save_every and update % self.save_every == 0:
            self.run_checkpoint.save(update, **self.parts)

    def _finish_run(self) -> None:
        if self.save_every and self.done["updates"] % self.save_every:
            self.run_checkpoint.save(self.done["updates"], **self.parts)
        self.policy.model.save_pretrained(self.folder / "model")  # adapters, or all weights
        self.policy.tokenizer.save_pretrained(self.folder / "model")
        self._evaluate("after")
        if self.done["updates"] < self.updates:
            print(f"the data ended after {self.done['updates']} of {self.updates} updates")
        found, (_, rewards) = self.results, read_run(self.folder).series("reward")
        if len(rewards):
            print(
                f"reward in training {rewards[0]:.2f} -> {rewards[-1]:.2f}, first and last update"
            )
        for name, text in (("", "reward in evaluation"), ("nll_", "plain text nll")):
            if f"{name}before" in found and f"{name}after" in found:
                print(f"{text} {found[f'{name}before']:.2f} -> {found[f'{name}after']:.2f}")
        for finding in check_run(self.folder):
            if finding.level != "good":
                print(finding)
        with contextlib.suppress(ImportError):  # matplotlib is an extra
            print(f"curves: {plot_run(self.folder)}")

    def _play(self) -> tuple[float, TensorDictBase]:
        """Play the items of the evaluation; return the mean reward of an episode, and the episodes."""
        played = self.collector.evaluate(self.eval_data, **self.eval_kwargs)
        self.collector.engine.forget_cache()  # so that training does not depend on evaluations
        episodes = played["next", "done"].sum().item()
        return played["next", "reward"].sum().item() / episodes, played

    def _evaluate(self, when: str) -> None:
        """Take what :meth:`train` returns of this moment, and write a page of the episodes."""
        if self.eval_data is not None:
            print(f"evaluation {when} training: {len(self.eval_data)} items")
            self.results[when], played = self._play()
            write_report(played, self.folder / f"{when}.html", tokenizer=self.policy.tokenizer)
        with contextlib.suppress(ValueError):  # a tokenizer of a few words has no plain text
            self.results[f"nll_{when}"] = self.policy.plain_text_nll()


def _check_function(task: Any) -> None:
    """Refuse a function that neither makes an environment nor takes what a reward function does."""
    if inspect.isfunction(task) and not is_reward(task) and misfit(task):
        raise TypeError(
            "task, if it is a reward function, must take the messages and the item, got "
            f"{task.__name__}{inspect.signature(task)}."
        )
