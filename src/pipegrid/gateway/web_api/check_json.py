"""Results of checks and repairs, as JSON of the web API."""

from __future__ import annotations

from typing import Any

from pipegrid.core import base32
from pipegrid.core.caps import Cap, UnknownCap
from pipegrid.errors import NotEnoughSharesError
from pipegrid.transfer.mutable.mutable_check import MutableCheckResult
from pipegrid.transfer.results import CheckResult, RepairResult

# Fields and texts are exactly those of Tahoe-LAFS's web API; some clients compare the texts.
#
# **Healthy** has Tahoe-LAFS's meaning: each share has a good copy, and there is only one version. PipeGrid
# also wants the shares on as many different servers as possible: a repair that stores shares for this is
# reported as a repair, even if the object was healthy.

Json = dict[str, Any]


def storage_index_text(cap: Cap | None) -> str:
    """Return the storage index of an object as Tahoe-LAFS writes it; "" if the object has no shares."""
    if cap is None or isinstance(cap, UnknownCap):
        return ""
    index = cap.storage_index
    return "" if index is None else base32.encode(index)


def is_healthy(result: CheckResult) -> bool:
    """Return whether an object is healthy as the web API defines it."""
    if isinstance(result, MutableCheckResult):
        one_version = result.recoverable_versions == 1 and not result.unrecoverable_versions
        return result.recoverable and result.is_complete and one_version and not result.seen
    return result.recoverable and result.is_complete


def summary(result: CheckResult) -> str:
    """Return Tahoe-LAFS's text for the health of an object."""
    if is_healthy(result):
        return "Healthy"
    found, k, n = len(result.good_shares), result.required_shares, result.total_shares
    shares = f"{found} shares (enc {k}-of-{n})"
    if not isinstance(result, MutableCheckResult):
        return f"Not Healthy: {shares}"
    said = []
    if result.unrecoverable_versions:
        said.append("some versions are unrecoverable")
    if not result.recoverable:
        said.append("no versions are recoverable")
    if result.recoverable_versions > 1:
        said.append("multiple versions are recoverable")
    if result.seen:
        said.append(f"version {result.seen}, which was seen before, is missing")
    if result.recoverable and found < n:
        said.append(shares)
    return "Unhealthy: " + " ".join(said)


def check_json(result: CheckResult | None) -> Json:
    """Return the result of a check; ``result`` is None if the object has no shares."""
    if result is None or not result.total_shares:
        return {"storage-index": "", "results": {"healthy": True}}
    return {
        "storage-index": storage_index_text(result.cap),
        "summary": summary(result),
        "results": {
            **_counts(result),
            "healthy": is_healthy(result),
            "recoverable": result.recoverable,
        },
    }


def _counts(result: CheckResult) -> Json:
    if isinstance(result, MutableCheckResult):
        recoverable, unrecoverable = result.recoverable_versions, result.unrecoverable_versions
        wrong = len(result.other_holders)
    else:
        recoverable, unrecoverable = int(result.recoverable), int(not result.recoverable)
        wrong = 0
    hosts = {server for servers in result.share_servers.values() for server in servers}
    corrupt = corrupt_shares(result)
    return {
        "count-happiness": result.happiness,
        "count-shares-good": len(result.good_shares),
        "count-shares-needed": result.required_shares,
        "count-shares-expected": result.total_shares,
        "count-good-share-hosts": len(hosts),
        "count-corrupt-shares": len(corrupt),
        "list-corrupt-shares": corrupt,
        "servers-responding": sorted(result.answered),
        "sharemap": _share_map(result),
        "count-wrong-shares": wrong,
        "count-recoverable-versions": recoverable,
        "count-unrecoverable-versions": unrecoverable,
    }


def corrupt_shares(result: CheckResult) -> list[list[Any]]:
    """Return a list of server, storage index and share number for each damaged copy of a share."""
    ids = {name: server for server, name in result.answered.items()}
    index = storage_index_text(result.cap)
    return [[ids.get(one.server, one.server), index, one.share_number] for one in result.corrupt]


def _share_map(result: CheckResult) -> dict[str, list[str]]:
    if not isinstance(result, MutableCheckResult):
        return {str(number): servers for number, servers in result.share_servers.items()}
    holders = list(result.other_holders)
    if result.version is not None:
        best = result.version
        holders += [(best, number, servers) for number, servers in result.share_servers.items()]
    return {
        f"seq{version.sequence_number}-{base32.encode(version.root_hash)[:4]}-sh{number}": servers
        for version, number, servers in holders
    }


def repair_json(outcome: CheckResult | RepairResult | None, *, failed: bool = False) -> Json:
    """
    Return the result of a check with repair.

    Args:
        outcome: None if the object has no shares.
        failed: ``outcome`` is the check of an object whose repair failed.
    """
    if outcome is None or (isinstance(outcome, CheckResult) and not outcome.total_shares):
        return _repair(_NO_SHARES, _NO_SHARES, False, False)
    if not isinstance(outcome, RepairResult):
        lost = not outcome.recoverable
        return _repair(check_json(outcome), check_json(outcome), failed or lost, False)
    # A repair counts as attempted if shares were missing, or were stored again.
    attempted = bool(outcome.uploaded) or not outcome.before.healthy
    after = check_json(outcome.after)
    if attempted and not isinstance(outcome.after, MutableCheckResult):
        # After the repair of a mutable file, Tahoe-LAFS writes its usual summary; after that of an immutable
        # file, one of these texts.
        after["summary"] = "healthy" if after["results"]["healthy"] else "not healthy"
    successful = attempted and outcome.after.is_complete
    return _repair(check_json(outcome.before), after, attempted, successful)


_NO_SHARES: Json = {
    "storage-index": "",
    "results": {
        "healthy": True,
        "count-shares-good": 0,
        "count-shares-needed": 0,
        "count-shares-expected": 0,
        "count-wrong-shares": 0,
        "list-corrupt-shares": [],
    },
}
"""Result for a literal object; has the fields that ``tahoe check --repair`` always reads."""


def _repair(before: Json, after: Json, attempted: bool, successful: bool) -> Json:
    return {
        "storage-index": after["storage-index"],
        "repair-attempted": attempted,
        "repair-successful": successful,
        "pre-repair-results": before,
        "post-repair-results": after,
    }


def check_recoverable(result: CheckResult) -> None:
    """
    Check that enough shares of an immutable object were found for its repair.

    Raises:
        NotEnoughSharesError: too few shares were found.
    """
    if result.recoverable or isinstance(result, MutableCheckResult):
        return
    found, k, n = len(result.good_shares), result.required_shares, result.total_shares
    raise NotEnoughSharesError(
        f"only {found} good shares of this object were found, and its repair needs {k}; try again when "
        "more servers can be reached",
        found,
        k,
        len(result.unreachable),
        n,
    )
