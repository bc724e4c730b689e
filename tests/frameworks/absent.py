"""Lets modules be imported that only GPU kernels need: importing `absent` makes them empty shells."""

import importlib.abc
import importlib.machinery
import sys
import types
from unittest.mock import MagicMock

ABSENT = ("flash_attn", "xformers", "bitsandbytes", "wandb", "modelopt", "deep_ep")
# Modules whose layers others derive classes from, and the version that they are said to have. Diffusion models, which no
# plan is for, are left out of Megatron Bridge: they need more packages.
KERNELS = {"transformer_engine": "2.15.0", "nvidia_resiliency_ext": "0.6.0", "megatron.bridge.diffusion": "0", "megatron.energon": "0"}


class Shell(MagicMock):
    __path__ = []
    __spec__ = importlib.machinery.ModuleSpec("shell", None)


class Kind(type):
    """A class that has whatever is asked of it."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


class FusedAdam:
    """Transformer Engine's optimizer, by the arguments for which Megatron-Core looks."""

    def __init__(
        self, params, lr=1e-3, *, use_decoupled_grad=False, master_weight_dtype=None, exp_avg_dtype=None,
        exp_avg_sq_dtype=None, store_param_remainders=False,
    ):
        raise NotImplementedError("this is a stand-in")


class Layers(types.ModuleType):
    """A module of layers without kernels: its names in capitals are classes, all others are shells."""

    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "FusedAdam":
            return FusedAdam
        import torch

        made = Kind(name, (torch.nn.Module,), {"__module__": self.__name__}) if name[0].isupper() else MagicMock()
        setattr(self, name, made)
        return made


def within(name, packages):
    """The package of these that a module belongs to."""
    return next((package for package in packages if f"{name}.".startswith(f"{package}.")), None)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if within(name, (*ABSENT, *KERNELS)):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        if top := within(spec.name, KERNELS):
            layers = Layers(spec.name)
            layers.__version__ = KERNELS[top]
            return layers
        shell = Shell()
        shell.__name__ = spec.name
        shell.__version__ = "0.0.0"
        return shell

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Finder())

# Megatron-LM is written for Python 3.12.
import typing  # noqa: E402

import typing_extensions  # noqa: E402

if not hasattr(typing, "override"):
    typing.override = typing_extensions.override
