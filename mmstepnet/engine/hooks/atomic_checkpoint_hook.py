"""Checkpoints that are on the disk either whole or not at all."""

from mmengine.dist import is_main_process
from mmengine.fileio import LocalBackend, get_file_backend, register_backend
from mmengine.hooks import CheckpointHook

from mmstepnet.registry import HOOKS
from mmstepnet.utils.files import write_whole


@register_backend('atomic_local')
class AtomicLocalBackend(LocalBackend):
    """The local file system; a file appears under its name only when it is complete."""

    def put(self, obj: bytes, filepath) -> None:
        """Write to a file beside the target and rename it, so that a kill leaves the old one.

        Raises:
            OSError: The disk is full, say. Nothing is left of the new file.
        """
        write_whole(obj, filepath)


@HOOKS.register_module()
class AtomicCheckpointHook(CheckpointHook):
    """MMEngine's ``CheckpointHook`` for runs that may be killed at any moment.

    Checkpoints are written whole or not at all, and with ``max_keep_ckpts`` or ``save_best`` the
    old one goes after the new one is there, not before. Takes the arguments of ``CheckpointHook``;
    with ``backend_args`` or ``file_client_args`` of another storage, only the order is changed.
    """

    def before_train(self, runner) -> None:
        # Where the address tells MMEngine of another storage, that one is used.
        where = get_file_backend(self.out_dir or runner.work_dir)
        given = self.backend_args is not None or self.file_client_args is not None
        if not given and type(where) is LocalBackend:
            self.backend_args = dict(backend='atomic_local')
        super().before_train(runner)

    def _save_checkpoint_with_step(self, runner, step, meta) -> None:
        outdated = None
        keep = getattr(self, 'keep_ckpt_ids', ())
        if self.max_keep_ckpts > 0 and len(keep) == self.max_keep_ckpts and keep[-1] != step:
            outdated = keep.popleft()
        super()._save_checkpoint_with_step(runner, step, meta)
        if outdated is not None:
            self._remove(
                self.file_backend.join_path(self.out_dir, self.filename_tmpl.format(outdated))
            )

    def _save_best_checkpoint(self, runner, metrics) -> None:
        before = self._best_paths()
        # The parent removes the paths that it knows as the best ones before it writes the new.
        self._set_best_paths(dict.fromkeys(before))
        super()._save_best_checkpoint(runner, metrics)
        after = self._best_paths()
        self._set_best_paths({key: after[key] or before[key] for key in before})
        for key, path in before.items():
            if path and after[key] and path != after[key]:
                self._remove(path)

    def _best_paths(self) -> dict:
        if not self.save_best:
            return {}
        if len(self.key_indicators) == 1:
            return {None: self.best_ckpt_path}
        return dict(self.best_ckpt_path_dict)

    def _set_best_paths(self, paths: dict) -> None:
        if None in paths:
            self.best_ckpt_path = paths[None]
        elif paths:
            self.best_ckpt_path_dict = paths

    def _remove(self, path: str) -> None:
        if is_main_process() and self.file_backend.isfile(path):
            self.file_backend.remove(path)
