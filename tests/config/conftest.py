"""A folder of configuration files and what loading them gives."""

from collections.abc import Callable
from pathlib import Path

import pytest

from supervisord.config import ConfigError, files_beside, load
from supervisord.core.spec import Config

RUNTIME = Path("/run/user/1000")

Loader = Callable[..., Config]


@pytest.fixture
def loaded(tmp_path: Path) -> Loader:
    """Write the main file and drop-ins (``name=text``), load them."""

    def load_texts(main: str, **drop_ins: str) -> Config:
        (tmp_path / "config.toml").write_text(main, encoding="utf-8")
        for name, text in drop_ins.items():
            (tmp_path / "config.d").mkdir(exist_ok=True)
            (tmp_path / "config.d" / f"{name}.toml").write_text(text, encoding="utf-8")
        return load(files_beside(tmp_path / "config.toml"), runtime_dir=RUNTIME)

    return load_texts


@pytest.fixture
def mistakes(loaded: Loader, tmp_path: Path) -> Callable[..., list[str]]:
    """The mistakes of such files, as a person reads them, with the folder's name taken off."""

    def mistakes_of(main: str, **drop_ins: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            loaded(main, **drop_ins)
        return [str(problem).replace(f"{tmp_path}/", "") for problem in caught.value.problems]

    return mistakes_of
