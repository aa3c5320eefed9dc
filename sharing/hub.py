"""Publishing a model or an adapter: one commit that holds all of it, or none.

Large files go up before the commit and are known by their content, so a push that was interrupted goes on where it
stopped when it is given again, and a repository never holds half a model.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import CheckpointError, HubError, PalimpsaError, UsageError
from ..base.files import output_folder, refuse_existing, refuse_to_delete
from ..base.network import check_network
from ..surgery.checkpoint.sources import read_foreign_json, reading
from ..surgery.conversion.card import is_own_card
from .staging import ADAPTER, CARD, MODEL, SECRET, Upload, prepare_upload

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import ModelInfo

logger = logging.getLogger(__name__)

_STALE = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
_HOLDS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".onnx", ".h5", ".msgpack")


@dataclass(frozen=True)
class PushResult:
    """What a push did.

    Attributes:
        repo_id: owner/name.
        url: of the repository.
        commit: of this push; the one that was there when nothing has changed.
        private: whether only its owner sees it.
        files: names of the files of the model.
        removed: files of an earlier push, or of the model that was replaced, that are gone.
        notes: what a user should know.
    """

    repo_id: str
    url: str
    commit: str
    private: bool
    files: tuple[str, ...]
    removed: tuple[str, ...]
    notes: tuple[str, ...]


def push_to_folder(
    model: str | Path,
    repo_id: str,
    target: str | Path,
    *,
    evaluation: str | Path | None = None,
    base: str | None = None,
    force: bool = False,
) -> Path:
    """Writes the folder that a push would upload; weights are linked where the file system can.

    Args:
        model: a model folder or an adapter folder.
        repo_id: owner/name, for the card.
        target: the folder to make.
        evaluation: eval.json for the card; by default the one in the folder.
        base: Hub id of an adapter's base.
        force: replace `target` when it exists.

    Returns:
        `target`.

    Raises:
        UsageError: no name that the Hub would accept.
        PalimpsaError: as `prepare_upload`.
    """
    _check_name(repo_id)
    refuse_existing(target, force=force)
    refuse_to_delete(target, model, evaluation)
    with output_folder(target, force=force) as folder:
        upload = prepare_upload(model, folder, repo_id, evaluation=evaluation, base=base)
        with reading(model):
            for name, path in upload.files.items():
                if folder not in path.parents:
                    _link_or_copy(path, folder / name)
        upload.refuse_changed()
    for note in upload.notes:
        logger.info("%s", note)
    return Path(target)


def push(
    model: str | Path,
    repo_id: str,
    *,
    public: bool = False,
    force: bool = False,
    evaluation: str | Path | None = None,
    base: str | None = None,
    token: str | None = None,
) -> PushResult:
    """Uploads what `push_to_folder` writes.

    A new repository is private unless `public`; one that exists keeps its visibility. A README.md in it that this
    package has not written is kept. Weights of an earlier push that are no part of this one are removed.

    Args:
        model: a model folder or an adapter folder.
        repo_id: owner/name; a bare name is taken as the token's owner's.
        public: for a new repository.
        force: replace another model that is there, its files included.
        evaluation: eval.json for the card; by default the one in the folder.
        base: Hub id of an adapter's base.
        token: Hub token; by default the stored one.

    Raises:
        UsageError: no such kind of name, no token, or the repository holds another model.
        HubError: the Hub refuses or cannot be reached.
        PalimpsaError: as `prepare_upload`.
    """
    from huggingface_hub import HfApi, get_token

    _check_name(repo_id)
    check_network(token)
    token = token or get_token()
    if not token:
        raise UsageError("push needs a Hub token and none is stored; run `hf auth login`, or set HF_TOKEN")
    api = HfApi(token=token)
    with _hub_errors(repo_id, token):
        name = repo_id if "/" in repo_id else f"{api.whoami()['name']}/{repo_id}"
    with tempfile.TemporaryDirectory(prefix="palimpsa-push-") as temporary:
        staging, fetched = Path(temporary) / "staging", Path(temporary) / "fetched"
        staging.mkdir()
        upload = prepare_upload(model, staging, name, evaluation=evaluation, base=base, token=token)
        with _hub_errors(name, token), _progress():
            return _Push(api, name, upload, fetched, public, force).run()


@dataclass
class _Push:
    """One push, once its files are put together."""

    api: HfApi
    repo_id: str
    upload: Upload
    fetched: Path
    public: bool
    force: bool

    def run(self) -> PushResult:
        """Creates what is missing, checks what is there, commits."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        info, notes = self._repository()
        present = {sibling.rfilename for sibling in info.siblings or ()}
        same = self._same_model(info, present)
        if not same and not self.force:
            raise UsageError(
                f"{self.repo_id}: holds another model already ({', '.join(sorted(present)[:4])}); choose another name, "
                "or give --force to replace it"
            )
        files = dict(self.upload.files)
        if CARD in present and not is_own_card(self._text(info, CARD)):
            del files[CARD]
            notes.append(f"{CARD} there was not written by this program and stays as it is")
        removed = sorted(name for name in present - set(self.upload.files) if self._goes(name, same))
        operations: list[Any] = [CommitOperationDelete(name) for name in removed]
        operations += [CommitOperationAdd(name, str(path)) for name, path in files.items()]
        self.upload.refuse_changed()  # each operation has taken the checksum of its file
        commit = self.api.create_commit(
            self.repo_id, operations, commit_message=f"Upload {self.upload.kind}", parent_commit=info.sha
        )
        return PushResult(
            repo_id=self.repo_id,
            url=f"{self.api.endpoint}/{self.repo_id}",
            commit=commit.oid,
            private=bool(info.private),
            files=tuple(files),
            removed=tuple(removed),
            notes=(*self.upload.notes, *notes),
        )

    def _repository(self) -> tuple[ModelInfo, list[str]]:
        """The repository, made when it is not there, and what to say of its visibility."""
        from huggingface_hub.errors import RepositoryNotFoundError

        try:
            info = self.api.model_info(self.repo_id)
        except RepositoryNotFoundError:
            self.api.create_repo(self.repo_id, private=not self.public, exist_ok=True)
            return self.api.model_info(self.repo_id), []
        if self.public and info.private:
            return info, ["the repository exists and is private; it stays so (change that in its settings)"]
        return info, [] if info.private else ["the repository exists and is public"]

    def _same_model(self, info: ModelInfo, present: set[str]) -> bool:
        """Whether nothing is there yet, or an earlier version of what is pushed: by what both say of their source."""
        if not any(name.endswith(_HOLDS) for name in present) and not present & {"config.json", "adapter_config.json"}:
            return True
        if self.upload.kind == ADAPTER:
            theirs = self._table(info, present, "adapter_source.json")
            config = self._table(info, present, "adapter_config.json")
            identity = {"base_fingerprint": theirs.get("fingerprint"), "peft_type": config.get("peft_type")}
            return "config.json" not in present and identity == self.upload.identity
        config, report = (self._table(info, present, name) for name in ("config.json", "surgery_report.json"))
        identity = {key: config.get(key) for key in self.upload.identity}
        identity["source_fingerprint"] = report.get("source_fingerprint")
        return identity == self.upload.identity

    def _goes(self, name: str, same: bool) -> bool:
        """Whether a file that is there and not part of the push is removed."""
        if name in (CARD, ".gitattributes"):
            return False
        if not same:
            return True
        return self.upload.kind == MODEL and "/" not in name and name.endswith(_STALE)

    def _text(self, info: ModelInfo, name: str) -> str:
        path = self.api.hf_hub_download(self.repo_id, name, revision=info.sha, local_dir=self.fetched)
        return Path(path).read_text(encoding="utf-8", errors="replace")

    def _table(self, info: ModelInfo, present: set[str], name: str) -> dict[str, Any]:
        if name not in present:
            return {}
        self._text(info, name)
        try:
            return read_foreign_json(self.fetched / name)
        except CheckpointError:
            return {}


def _check_name(repo_id: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"{repo_id[:100]}: is no name of a repository, expected owner/name ({reason})") from error


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source.resolve())
    except OSError:
        shutil.copyfile(source, target)


@contextlib.contextmanager
def _progress() -> Iterator[None]:
    """The client's own bars, on a terminal only."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextlib.contextmanager
def _hub_errors(repo_id: str, token: str) -> Iterator[None]:
    """One sentence, without the token, for whatever the client raises."""
    import httpx
    from huggingface_hub import errors as hub

    try:
        yield
    except PalimpsaError:
        raise
    except hub.HFValidationError as error:
        raise UsageError(
            f"{repo_id}: is no name of a repository, expected owner/name ({_line(error, token)})"
        ) from error
    except hub.OfflineModeIsEnabled as error:
        raise HubError(f"{repo_id}: offline mode is on (HF_HUB_OFFLINE); unset it to push") from error
    except hub.HfHubHTTPError as error:
        raise HubError(f"{repo_id}: {_refusal(error, token)}") from error
    except (httpx.HTTPError, OSError, RuntimeError, ValueError) as error:
        raise HubError(
            f"{repo_id}: the upload stopped ({_line(error, token)}); push again, what arrived is not sent twice"
        ) from error


def _refusal(error: Any, token: str) -> str:
    status = getattr(error.response, "status_code", 0)
    if status == 401:
        return "the Hub does not accept the token; run `hf auth login` again"
    if status == 403:
        return "the token may not write there; use one with write access, or a repository of your own"
    if status in (409, 412):
        return f"the repository changed meanwhile ({_line(error, token)}); push again"
    return f"the Hub refused ({_line(error, token)}); push again, what arrived is not sent twice"


def _line(error: BaseException, token: str) -> str:
    """The message and, where the client wraps an error, the one inside; on one line, without the token."""
    parts = [str(one) or type(one).__name__ for one in (error, error.__cause__) if one is not None]
    text = " ".join(": ".join(parts).split())
    return SECRET.sub("hf_...", text.replace(token, "hf_..."))[:300]
