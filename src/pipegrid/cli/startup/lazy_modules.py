"""
Modules that are imported when they are used, and not where they are named.

**The package's own.** A command names at the top of its modules all that some run of it may need, and most
runs need a part of it. So in the process of a command ``from pipegrid.tree import walk`` gives a module that
is executed when something in it is asked for, by whatever way; ``from pipegrid.tree.walk import Met`` asks.
It stays the same object.

**Those of others** that Twisted imports and a command hardly ever needs.

Twisted's ``Deferred`` names two classes of asyncio in annotations; an old list of its has ``http.cookiejar``,
with ``urllib``, ``http.client`` and ``email`` behind it; its reactor would have TLS, processes, UDP, and
sockets in the file system; zfec has commands. Together they were a quarter of what a ``put`` of a small file
computes. ``click`` has a type for UUIDs, ``urllib.parse`` knows addresses in brackets. So a stand-in takes
their place among Python's modules, which imports the real one as soon as anybody asks it for anything. Only
the process of a command does that, whose modules are all ours to say; it must come before Twisted.
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

TYPE_CHECKING = False  # as ``typing`` has it, which is not to be waited for
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
"""What Python looks up in a module while it imports it."""


class UnusedModule(ModuleType):
    """One of the package's own modules, as long as nothing of it was asked for."""

    __loader__: Any

    def __getattr__(self, name: str) -> Any:
        if name not in _ASKED_BY_IMPORTS:
            self.__loader__.execute(self)
        return object.__getattribute__(self, name)


class _OnUse:
    """
    The loader of one of the package's own modules: it executes the module when that is used.

    Args:
        loader: the one that Python would have taken.
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
        """Execute a module, once; another thread waits for it, and circular imports see what is there."""
        with self._lock:
            if self._executed:
                return
            self._executed = True
            try:
                self._loader.exec_module(module)
            except BaseException:
                self._executed = False  # who asks again is told again
                raise
            module.__class__ = ModuleType


class OwnModules:
    """Finds the modules of the package, and leaves them to be executed when they are used."""

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
    """Have the package's modules executed when they are used, in a process that runs one command."""
    finder: Any = OwnModules
    sys.meta_path.insert(0, finder)


class LazyModule(ModuleType):
    """
    Stands for a module, until something of it is asked for that is not known here.

    Args:
        name: of the module, which has to exist.
        known: some of what is in it.
    """

    def __init__(self, name: str, **known: object) -> None:
        super().__init__(name)
        spec = None
        if "." not in name:  # looking for one within a package would import the package
            self.__spec__ = spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            self.__path__ = spec.submodule_search_locations  # or ``from`` would ask for it
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real(), name)

    def _real(self) -> ModuleType:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return import_module(self.__name__)


class _Within:
    """
    Finds modules within packages that are put off: those have to be imported first, with all they have.

    As ``importlib.abc`` describes finders and loaders; importing that takes longer than all the rest here.
    """

    def __init__(self) -> None:
        self._found: dict[str, ModuleType] = {}

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        package = sys.modules.get(fullname.rpartition(".")[0])
        if not isinstance(package, LazyModule):
            return None
        package._real()
        found = sys.modules.pop(fullname, None)  # there, it would be taken for one to execute again
        if found is None:
            return None
        self._found[fullname] = found
        loader: Any = self
        return ModuleSpec(fullname, loader)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._found.pop(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """It was, when its package was imported."""


def install_lazy_modules() -> None:
    """Have stand-ins for what is not imported yet."""
    for name in LAZY:
        if name not in sys.modules:
            sys.modules[name] = LazyModule(name)
    if "asyncio" not in sys.modules:
        # The classes are for annotations, which nobody evaluates.
        sys.modules["asyncio"] = LazyModule(
            "asyncio", iscoroutine=_iscoroutine, AbstractEventLoop=None, Future=None
        )
        sys.meta_path.insert(0, _Within())


def bring_in(*own: ModuleType) -> None:
    """
    Import all that was put off.

    For a process that runs for long: its program may be replaced by another version's meanwhile.

    Args:
        own: modules of the package that it is going to use; it gets all that these name, and those in turn.
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


@contextmanager
def tls_put_off() -> Iterator[None]:
    """
    Have Twisted's reactor, if it is imported meanwhile, import its TLS when that is used.

    Connections to storage servers over HTTPS do not use it, and with it come pyOpenSSL and X.509.
    """
    name = "twisted.protocols.tls"
    if name in sys.modules:
        yield
        return
    # This is all that the reactor asks of it, and the reactor alone shall have it.
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
    """Say what ``asyncio.iscoroutine`` does; until Python 3.12 generators were coroutines, too."""
    kinds = (CoroutineType, Coroutine)
    return isinstance(thing, kinds if sys.version_info >= (3, 12) else (*kinds, GeneratorType))
