"""Makes interpreters start faster. Python runs it first if this folder is in PYTHONPATH.

Every import of Lightning loads torchmetrics. Some optional packages that torchmetrics would import without need are
hidden from it. Entry points, which each Trainer reads, are read only once. Together, these take two fifths of the time
until a script begins.

Garbage collection runs less often, because imported modules are not garbage. It takes another fifth of the time.
Lightning also imports torch's compiler for the name of one class. This takes a third of the remaining time, and the
import is delayed until something is compiled.
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
    """Return the version of a package, unless it is hidden."""
    if name in UNSEEN:
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)


def found_if_seen(name, package=None):
    """Return the spec of a module, unless it is hidden."""
    return None if name in UNSEEN else find_spec(name, package)


importlib.metadata.version, importlib.util.find_spec = version_if_seen, found_if_seen

read_entry_points = importlib.metadata.entry_points
entry_points_of_path = functools.cache(lambda folders: read_entry_points())


def cached_entry_points(**asked):
    """Return the entry points, which are read again only if the folders of installed packages change."""
    folders = tuple(folder for folder in sys.path if "-packages" in folder or "/toys/" in folder)
    return entry_points_of_path(folders).select(**asked)


importlib.metadata.entry_points = cached_entry_points


DYNAMO = "torch._dynamo"


class Compiler(types.ModuleType):
    """A placeholder for `torch._dynamo` until an attribute is requested that the placeholder does not have."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(load_compiler(), name)


class CompiledType(type):
    """The type of the placeholder for `OptimizedModule`."""

    def __instancecheck__(cls, instance):
        compiler = sys.modules[DYNAMO]
        return not isinstance(compiler, Compiler) and isinstance(instance, compiler.OptimizedModule)


class CompiledModule(metaclass=CompiledType):
    """A placeholder for `OptimizedModule`. `isinstance` uses the class of the compiler if the compiler is loaded."""


def load_compiler():
    """Return the compiler, which replaces the placeholder."""
    if isinstance(sys.modules.get(DYNAMO), Compiler):
        del sys.modules[DYNAMO]
    return importlib.import_module(DYNAMO)


class CompilerFinder:
    """A finder that returns the placeholder once, and loads the compiler when one of its submodules is imported."""

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
        # Optimizers and process groups call these functions, which have an effect only for compiled functions.
        module.disable = lambda function, *_, **__: function
        module.graph_break = lambda: None
        module.trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)
        return module

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, CompilerFinder())
