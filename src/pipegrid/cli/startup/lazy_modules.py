"""
Delays modules: they are executed on first use instead of at their import.

The delay must be set up before Twisted is imported, and only in a process that runs one command: a program
that embeds PipeGrid expects ordinary modules.
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

TYPE_CHECKING = False  # instead of the import from ``typing``, which is slow
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
"""Attributes that Python reads while it imports a module."""


class UnusedModule(ModuleType):
    """A module of this package before its first use."""

    __loader__: Any

    def __getattr__(self, name: str) -> Any:
        if name not in _ASKED_BY_IMPORTS:
            self.__loader__.execute(self)
        return object.__getattribute__(self, name)


class _OnUse:
    """
    A loader for a module of this package; it executes the module on first use.

    Args:
        loader: Python's own loader for the module.
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
        """Do nothing; ``execute`` executes the module later."""

    def execute(self, module: ModuleType) -> None:
        """
        Execute a module once. Other threads wait meanwhile, and circular imports get the unfinished module.
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
    """A finder for the modules of this package, whose execution it delays until their first use."""

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
    Delay the execution of this package's modules until their first use, in a process that runs one command.

    The module of a command imports at its top everything that some run may need, and most runs need only a
    part of that. So ``from pipegrid.tree import walk`` binds a module that is executed when an attribute of
    it is used, while ``from pipegrid.tree.walk import Met`` uses an attribute at once. Executing does not
    replace the module object.
    """
    finder: Any = OwnModules
    sys.meta_path.insert(0, finder)


class LazyModule(ModuleType):
    """
    Takes the place of a module until an attribute that is not in ``known`` is used.

    Args:
        name: the name of the module, which must exist.
        known: the values of some attributes.
    """

    def __init__(self, name: str, **known: object) -> None:
        super().__init__(name)
        spec = None
        if "." not in name:  # for other names ``find_spec`` would import the package
            self.__spec__ = spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            # Otherwise ``from ... import`` would look up ``__path__``, which imports the package.
            self.__path__ = spec.submodule_search_locations
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real(), name)

    def _real(self) -> ModuleType:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return import_module(self.__name__)


class _Within:
    """
    A finder for modules in delayed packages; the package must be imported completely before its modules.

    The class has the methods of finders and loaders in ``importlib.abc``, but is not derived from them:
    importing that module takes longer than everything else here.
    """

    def __init__(self) -> None:
        self._found: dict[str, ModuleType] = {}

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        package = sys.modules.get(fullname.rpartition(".")[0])
        if not isinstance(package, LazyModule):
            return None
        package._real()
        found = sys.modules.pop(fullname, None)  # else Python executes the module again
        if found is None:
            return None
        self._found[fullname] = found
        loader: Any = self
        return ModuleSpec(fullname, loader)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._found.pop(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing, since importing the package has executed the module."""


def install_lazy_modules() -> None:
    """
    Delay modules of other packages that a command rarely needs, unless they are imported already.

    Importing these modules took a quarter of the CPU time of a small ``put``. Twisted's ``Deferred`` names
    two classes of asyncio in annotations. One of Twisted's old lists has ``http.cookiejar``, which imports
    ``urllib``, ``http.client`` and ``email``. Twisted's reactor imports TLS, processes, UDP and Unix sockets.
    zfec imports its commands. ``click`` has a type for UUIDs, and ``urllib.parse`` supports addresses in
    brackets.
    """
    for name in LAZY:
        if name not in sys.modules:
            sys.modules[name] = LazyModule(name)
    if "asyncio" not in sys.modules:
        # AbstractEventLoop and Future occur only in annotations, which are not evaluated, so None will do.
        sys.modules["asyncio"] = LazyModule(
            "asyncio", iscoroutine=_iscoroutine, AbstractEventLoop=None, Future=None
        )
        sys.meta_path.insert(0, _Within())


def bring_in(*own: ModuleType) -> None:
    """
    Import all delayed modules.

    A long-running process needs this, since an upgrade may replace the program's files while it runs.

    Args:
        own: modules of this package that the process will use; the modules that these import are executed as
            well.
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
    Import all delayed modules, as ``bring_in`` does; some need libraries of an extra of the package.

    Args:
        who_needs: the beginning of the error message.
        extra: the name of the extra for ``pip``.

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

    HTTPS connections to storage servers do not use Twisted's TLS, which imports pyOpenSSL and X.509.
    """
    name = "twisted.protocols.tls"
    if name in sys.modules:
        yield
        return
    # The reactor needs only this attribute of the module; the stand-in must not reach other code.
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
    """Return the same as ``asyncio.iscoroutine``; before Python 3.12, generators count as coroutines, too."""
    kinds = (CoroutineType, Coroutine)
    return isinstance(thing, kinds if sys.version_info >= (3, 12) else (*kinds, GeneratorType))
