"""Runs first in interpreters that have this folder in PYTHONPATH: for torchmetrics, which every import of Lightning
loads, some packages are not installed that it would load for nothing. Entry points, which each Trainer asks for, are
read once.

They take two fifths of the time until a script begins. The collector of garbage looks less often at what is imported,
which is none: that takes another fifth. Lightning also imports torch's compiler, for the name of one class; that is a
third of what is left, and waits until something is compiled.
"""

import functools
import gc
import importlib.metadata
import importlib.util
import sys
import types
from importlib.machinery import ModuleSpec

gc.set_threshold(20_000, 20, 20)
version, find_spec = importlib.metadata.version, importlib.util.find_spec
UNSEEN = {"transformers", "scipy", "matplotlib"}


def version_if_seen(name):
    if name in UNSEEN:
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)


def found_if_seen(name, package=None):
    return None if name in UNSEEN else find_spec(name, package)


importlib.metadata.version, importlib.util.find_spec = version_if_seen, found_if_seen

read_entry_points = importlib.metadata.entry_points
entry_points_of_path = functools.cache(lambda folders: read_entry_points())


def cached_entry_points(**asked):
    folders = tuple(folder for folder in sys.path if "-packages" in folder or "/toys/" in folder)
    return entry_points_of_path(folders).select(**asked)


importlib.metadata.entry_points = cached_entry_points


DYNAMO = "torch._dynamo"


class Compiler(types.ModuleType):
    """Stands for `torch._dynamo` until one of its attributes is asked for that does not stand here."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(load_compiler(), name)


class CompiledType(type):
    def __instancecheck__(cls, instance):
        compiler = sys.modules[DYNAMO]
        return not isinstance(compiler, Compiler) and isinstance(instance, compiler.OptimizedModule)


class CompiledModule(metaclass=CompiledType):
    """What has this type is asked of the compiler, if it is there."""


def load_compiler():
    if isinstance(sys.modules.get(DYNAMO), Compiler):
        del sys.modules[DYNAMO]
    return importlib.import_module(DYNAMO)


class CompilerFinder:
    """Finds the stand-in once, and the compiler when a module of it is imported."""

    found = False

    def find_spec(self, name, path=None, target=None):
        if name.startswith(f"{DYNAMO}."):
            load_compiler()
        if name != DYNAMO or self.found:
            return None
        self.found = True
        return ModuleSpec(name, self)

    def create_module(self, spec):
        module = Compiler(spec.name)
        module.__path__ = [f"{path}/_dynamo" for path in sys.modules["torch"].__path__]
        module.OptimizedModule = CompiledModule
        # What an optimizer and a process group call; compiled functions alone need what these do.
        module.disable = lambda function, *_, **__: function
        module.graph_break = lambda: None
        module.trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)
        return module

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, CompilerFinder())
