"""From TOML files to the values of ``supervisord.core.spec``, with every mistake told at once."""

from supervisord.config.load import default_files, files_beside, load, runtime_directory
from supervisord.config.problems import ConfigError, Problem

__all__ = ["ConfigError", "Problem", "default_files", "files_beside", "load", "runtime_directory"]
