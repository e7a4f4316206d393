"""
Modules that are executed on first use instead of at their import.

It must be set up before Twisted is imported, and only in the process of a command, which decides about all
its modules.
"""

from __future__ import annotations

import sys
from _thread import RLock
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import CoroutineType, GeneratorType, ModuleType

from pipegrid.errors import UsageError

TYPE_CHECKING = False  # as in ``typing``, which is slow to import
if TYPE_CHECKING:
    from typing import Any

LAZY = (
    "http.cookiejar",
    "ipaddress",
    "twisted.internet.process",
    "twisted.internet.ssl",
    "twisted.internet.udp",
    "twisted.internet.unix",
    "uuid",
    "zfec.cmdline_zfec",
    "zfec.cmdline_zunfec",
)


_ASKED_BY_IMPORTS = ("__path__", "__file__", "__cached__")
"""Names that Python looks up in a module while it imports it."""


class UnusedModule(ModuleType):
    """One of the package's own modules before its first use."""

    __loader__: Any

    def __getattr__(self, name: str) -> Any:
        if name not in _ASKED_BY_IMPORTS:
            self.__loader__.execute(self)
        return object.__getattribute__(self, name)


class _OnUse:
    """
    The loader of one of the package's own modules: it executes the module on first use.

    Args:
        loader: Python's own.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._executed = False
        self._lock = RLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return UnusedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module as it is until ``execute`` is called."""

    def execute(self, module: ModuleType) -> None:
        """
        Execute a module once; other threads wait for it, and circular imports get the unfinished module.
        """
        with self._lock:
            if self._executed:
                return
            self._executed = True
            try:
                self._loader.exec_module(module)
            except BaseException:
                self._executed = False  # the next use raises the error again
                raise
            module.__class__ = ModuleType


class OwnModules:
    """Finds the modules of the package, and delays their execution to the first use."""

    @staticmethod
    def find_spec(fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith("pipegrid."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.submodule_search_locations is not None or not spec.has_location:
            return spec
        loader: Any = _OnUse(spec.loader)
        spec.loader = loader
        return spec


def load_own_modules_on_use() -> None:
    """
    Execute the package's modules on first use, in a process that runs one command.

    A command's modules import at their top everything that some run may need, and most runs need a part of
    it. So ``from pipegrid.tree import walk`` gives a module that is executed when an attribute of it is
    used; ``from pipegrid.tree.walk import Met`` uses one. It stays the same object.
    """
    finder: Any = OwnModules
    sys.meta_path.insert(0, finder)


class LazyModule(ModuleType):
    """
    Replaces a module until an attribute is used that is not in ``known``.

    Args:
        name: of the module, which must exist.
        known: some of its attributes.
    """

    def __init__(self, name: str, **known: object) -> None:
        super().__init__(name)
        spec = None
        if "." not in name:  # finding a module in a package would import the package
            self.__spec__ = spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            self.__path__ = spec.submodule_search_locations  # otherwise ``from`` would look for it
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real(), name)

    def _real(self) -> ModuleType:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return import_module(self.__name__)


class _Within:
    """
    Finds modules in delayed packages, which must be imported completely first.

    It has the methods of finders and loaders in ``importlib.abc``, whose import takes longer than
    everything else here.
    """

    def __init__(self) -> None:
        self._found: dict[str, ModuleType] = {}

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        package = sys.modules.get(fullname.rpartition(".")[0])
        if not isinstance(package, LazyModule):
            return None
        package._real()
        found = sys.modules.pop(fullname, None)  # otherwise Python would execute it again
        if found is None:
            return None
        self._found[fullname] = found
        loader: Any = self
        return ModuleSpec(fullname, loader)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._found.pop(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: it was executed when its package was imported."""


def install_lazy_modules() -> None:
    """
    Delay modules of other packages that a command rarely needs, unless they are imported already.

    Twisted's ``Deferred`` names two classes of asyncio in annotations; one of its old lists has
    ``http.cookiejar``, which imports ``urllib``, ``http.client`` and ``email``; its reactor imports TLS,
    processes, UDP, and Unix sockets; zfec has commands. Together they were a quarter of the CPU time of a
    small ``put``. ``click`` has a type for UUIDs, ``urllib.parse`` supports addresses in brackets.
    """
    for name in LAZY:
        if name not in sys.modules:
            sys.modules[name] = LazyModule(name)
    if "asyncio" not in sys.modules:
        # The classes are for annotations, which are not evaluated.
        sys.modules["asyncio"] = LazyModule(
            "asyncio", iscoroutine=_iscoroutine, AbstractEventLoop=None, Future=None
        )
        sys.meta_path.insert(0, _Within())


def bring_in(*own: ModuleType) -> None:
    """
    Import all delayed modules.

    For a long-running process: an upgrade may replace its program meanwhile.

    Args:
        own: modules of the package that it will use; with all modules that these import.
    """
    for module in list(sys.modules.values()):
        if isinstance(module, LazyModule):
            module._real()
    waiting = [each for each in own if isinstance(each, UnusedModule)]
    while waiting:
        for each in waiting:
            each.__loader__.execute(each)
        waiting = [
            each
            for name, module in list(sys.modules.items())
            if name.startswith("pipegrid.") and not name.startswith("pipegrid.cli.")
            for each in list(vars(module).values())
            if isinstance(each, UnusedModule) and not isinstance(module, UnusedModule)
        ]


def bring_in_extra(who_needs: str, extra: str, *own: ModuleType) -> None:
    """
    Do the same for modules that use libraries of an extra of the package.

    Args:
        who_needs: the beginning of the error.
        extra: its name for ``pip``.

    Raises:
        UsageError: a library is not installed.
    """
    try:
        bring_in(*own)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{who_needs} the module {error.name}, which is not installed; install it with "
            f"pip install 'pipegrid[{extra}]'"
        ) from error


@contextmanager
def tls_put_off() -> Iterator[None]:
    """
    Delay the TLS of Twisted's reactor, if the reactor is imported within this context.

    HTTPS connections to storage servers do not use it, and it imports pyOpenSSL and X.509.
    """
    name = "twisted.protocols.tls"
    if name in sys.modules:
        yield
        return
    # The reactor needs only this of it, and only the reactor may get it.
    stand_in: Any = ModuleType(name)
    stand_in.TLSMemoryBIOFactory = _tls_factory
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]


def _tls_factory(*arguments: Any, **more: Any) -> Any:
    return import_module("twisted.protocols.tls").TLSMemoryBIOFactory(*arguments, **more)


def _iscoroutine(thing: object) -> bool:
    """Return the same as ``asyncio.iscoroutine``; until Python 3.12 generators were coroutines, too."""
    kinds = (CoroutineType, Coroutine)
    return isinstance(thing, kinds if sys.version_info >= (3, 12) else (*kinds, GeneratorType))
