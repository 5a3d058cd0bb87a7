"""The hub: what is fetched, and what its client's errors mean to a user."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from ligerformer.convert import CheckpointError, hub
from ligerformer.convert.folder import INDEX, WEIGHTS
from ligerformer.convert.hub import fetch


class FakeHub:
    """Stands for the hub: files by name; notes every call; raises ``error`` where set."""

    def __init__(self, root: Path, files: dict[str, str], error: Exception | None = None) -> None:
        self.folder = root / "models--o--n" / "snapshots" / "c0ffee"
        self.files, self.error, self.calls = files, error, []

    def snapshot_download(self, repo_id: str, **options: Any) -> str:
        self.calls.append((repo_id, options))
        if self.error is not None:
            raise self.error
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.files.items():
            if name in options["allow_patterns"]:
                (self.folder / name).write_text(text)
        return str(self.folder)

    def list_repo_files(self, repo_id: str, **options: Any) -> list[str]:
        return list(self.files)


def install(monkeypatch: pytest.MonkeyPatch, fake: FakeHub) -> FakeHub:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", fake.list_repo_files)
    return fake


def http_error(kind: type[errors.HfHubHTTPError]) -> errors.HfHubHTTPError:
    """One of the client's own errors, as it raises them, with the response that its version wants."""
    try:
        import httpx2 as client
    except ImportError:
        try:
            import httpx as client
        except ImportError:
            import requests

            return kind("the hub said no", response=requests.Response())
    response = client.Response(401, request=client.Request("GET", "https://huggingface.co"))
    return kind("the hub said no", response=response)


def test_a_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, FakeHub(tmp_path, {}))
    assert fetch(tmp_path) == tmp_path and fetch(str(tmp_path)) == tmp_path and fake.calls == []
    with pytest.raises(ValueError, match="only a repository on the hub has revisions"):
        fetch(tmp_path, revision="main")


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "a/b/c", "~nobody/x", Path("owner/name")])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Any) -> None:
    fake = install(monkeypatch, FakeHub(tmp_path, {}))
    with pytest.raises(CheckpointError, match=r"does not exist; expected a folder, or the id of a repository"):
        fetch(name)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a file; expected a folder"):
        fetch(str(tmp_path / "file"))
    assert fake.calls == []


def test_only_what_is_read_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "config.json": "{}",
        WEIGHTS: "w",
        "pytorch_model.bin": "p",
        "consolidated.safetensors": "c",
        "tokenizer.json": "{}",
        "x.py": "",
    }
    fake = install(monkeypatch, FakeHub(tmp_path, files))
    folder = fetch("o/n", revision="v1", token="secret", cache_dir=tmp_path, local_files_only=False)
    assert {p.name for p in folder.iterdir()} == {"config.json", WEIGHTS, "tokenizer.json"}
    ((name, options),) = fake.calls
    assert name == "o/n" and options["revision"] == "v1" and options["token"] == "secret" and options["cache_dir"] == tmp_path


def test_shards_are_fetched_by_the_index_and_of_the_same_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    files = {"config.json": "{}", INDEX: index, "model-1.safetensors": "1", "model-2.safetensors": "2", "model-3.safetensors": "3"}
    fake = install(monkeypatch, FakeHub(tmp_path, files))
    folder = fetch("o/n")
    assert {p.name for p in folder.iterdir()} == {"config.json", INDEX, "model-1.safetensors", "model-2.safetensors"}
    assert fake.calls[1][1]["revision"] == "c0ffee"


def test_an_index_that_leaves_the_folder_fetches_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, FakeHub(tmp_path, {INDEX: '{"weight_map": {"a": "../../evil.safetensors"}}'}))
    with pytest.raises(CheckpointError, match="no plain file name"):
        fetch("o/n")
    assert len(fake.calls) == 1


def test_the_config_alone_fetches_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeHub(tmp_path, {"config.json": "{}", WEIGHTS: "w", INDEX: "{}"}))
    assert {p.name for p in fetch("o/n", weights=False).iterdir()} == {"config.json"}


def test_a_repository_without_safetensors_says_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeHub(tmp_path, {"config.json": "{}", "pytorch_model.bin": "p"}))
    with pytest.raises(CheckpointError, match=r"o/n has its weights in pytorch_model.bin alone; only safetensors is read"):
        fetch("o/n")
    with pytest.raises(CheckpointError, match=r"the cache has no model.safetensors of o/n"):
        fetch("o/n", local_files_only=True)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            http_error(errors.GatedRepoError),
            r"o/n is gated: accept its licence at https://huggingface.co/o/n, then log in .* or pass token=",
        ),
        (http_error(errors.RepositoryNotFoundError), "no repository on the hub that you can see; check the spelling"),
        (http_error(errors.RevisionNotFoundError), "o/n has no revision 'v1'"),
        (http_error(errors.HfHubHTTPError), "fetching o/n from the hub failed: HfHubHTTPError: the hub said no"),
        (
            errors.LocalEntryNotFoundError("nothing here"),
            r"o/n is not in the cache in full, and the hub could not be reached \(nothing here\)",
        ),
        (errors.LocalTokenNotFoundError("no token"), "token=True asks for a stored token"),
        (errors.HFValidationError("bad id"), "'o/n' is no folder here and no valid repository id: bad id"),
        (OSError("disk full"), "fetching o/n from the hub failed: OSError: disk full"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Exception) else "",
)
def test_what_the_client_raises_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str) -> None:
    install(monkeypatch, FakeHub(tmp_path, {}, error))
    with pytest.raises(CheckpointError, match=words):
        fetch("o/n", revision="v1")


def test_without_a_network_the_cause_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real client, cut off: nothing answers at this address."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match=r"is not in the cache in full, and the hub could not be reached \(.*Error"):
        fetch("ligerformer/no-such-model", cache_dir=tmp_path)
    with pytest.raises(CheckpointError, match="is not in the cache in full, and local_files_only is set"):
        fetch("ligerformer/no-such-model", cache_dir=tmp_path, local_files_only=True)


def test_connection_errors_of_the_client_are_known() -> None:
    assert OSError in hub.CONNECTION_ERRORS
