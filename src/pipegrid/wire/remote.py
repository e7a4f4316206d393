# mypy: ignore-errors
# ruff: noqa: B008
# Foolscap's way to declare: no self, and what an argument may be as its default.
"""
The introducer's remote interfaces, as Foolscap wants them declared.

Source: the format reference, storage protocols, section 4.1.
"""

from foolscap.api import Any, DictOf, Referenceable, RemoteInterface, SetOf


class RIIntroducerSubscriberClient(RemoteInterface):
    """What a listener offers to the introducer."""

    __remote_name__ = "RIIntroducerSubscriberClient_v2.tahoe.allmydata.com"

    # One malformed announcement must not make the others fail, so each is looked at by itself, later.
    def announce_v2(announcements=SetOf(Any())):
        """Hear announcements: those known, then each new one."""


class RIIntroducer(RemoteInterface):
    """What an introducer offers: servers publish their announcements, clients subscribe to them."""

    __remote_name__ = "RIIntroducerPublisherAndSubscriberService_v2.tahoe.allmydata.com"

    def get_version():
        """Tell which versions of the protocol are spoken."""
        return DictOf(bytes, Any())

    def publish_v2(announcement=Any(), canary=Referenceable):
        """Tell all subscribers of the service that a signed announcement names."""

    def subscribe_v2(
        subscriber=RIIntroducerSubscriberClient,
        service_name=bytes,
        subscriber_info=DictOf(bytes, Any()),
    ):
        """Be told of all servers of a service."""
