"""What the parameter server decides, without torch and without connections: any order of events can be tried."""

from ringweave.params.rules.leads import Leads
from ringweave.params.rules.ledger import Holding, Ledger, Receipt
from ringweave.params.rules.meetings import Answer, Meetings
from ringweave.params.rules.positions import Position, Resumed, Span, Spans
from ringweave.params.rules.progress import Progress
from ringweave.params.rules.speakers import Speakers
from ringweave.params.rules.staleness import StalenessPolicy
from ringweave.params.rules.tempo import Tempo
from ringweave.params.rules.tickets import Ticket, TicketOffice

__all__ = [
    "Answer",
    "Holding",
    "Leads",
    "Ledger",
    "Meetings",
    "Position",
    "Progress",
    "Receipt",
    "Resumed",
    "Span",
    "Spans",
    "Speakers",
    "StalenessPolicy",
    "Tempo",
    "Ticket",
    "TicketOffice",
]
