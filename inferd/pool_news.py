"""News of memd that no request has asked for, and what they change in the engine."""

from __future__ import annotations

from inferd.core.ports import Capacity, Remap, Victim
from inferd.core.scheduler import Scheduler
from inferd.flight import Flight

News = Capacity | Victim | Remap


def hear(news: News, scheduler: Scheduler, flight: Flight) -> None:
    """Whatever was planned before must have been launched: what is in flight goes on with what it was launched with."""
    match news:
        case Capacity():
            scheduler.freed()
        case Victim(table_id):
            scheduler.victim(table_id)
        case Remap():
            scheduler.remap(news)
            flight.remapped(news.sequence)
