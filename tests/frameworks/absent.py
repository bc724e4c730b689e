"""Lets modules be imported that only GPU kernels need: importing `absent` makes them empty shells."""

import importlib.abc
import importlib.machinery
import sys
from unittest.mock import MagicMock

ABSENT = ("flash_attn", "xformers", "bitsandbytes", "wandb")


class Shell(MagicMock):
    __path__ = []
    __spec__ = importlib.machinery.ModuleSpec("shell", None)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        shell = Shell()
        shell.__name__ = spec.name
        shell.__version__ = "0.0.0"
        return shell

    def exec_module(self, module):
        pass


sys.meta_path.append(Finder())

# Megatron-LM is written for Python 3.12.
import typing  # noqa: E402

import typing_extensions  # noqa: E402

if not hasattr(typing, "override"):
    typing.override = typing_extensions.override
