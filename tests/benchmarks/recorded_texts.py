"""A contract and a server's log, of our own making, that state facts at their beginning: the first page replays them.

A fact is how a sentence of the text begins, how it ends, and the question for it.
"""

from datetime import datetime, timedelta
from random import Random

CONTRACT_FACTS = (
    ("The tenant of the workshop is", "Marisol Okafor", "Who is the tenant of the workshop?"),
    ("The landlord of the workshop is", "Teodor Brandt", "Who is the landlord of the workshop?"),
    ("The workshop stands in", "Harbour Lane", "In which street does the workshop stand?"),
    ("The tenant uses the workshop as a", "pottery", "What does the tenant use the workshop as?"),
    ("The lease begins on the first of", "October", "When does the lease begin?"),
    ("The rent for each month is", "940 euros", "How high is the rent for each month?"),
    ("The deposit is kept at", "Linden Bank", "Where is the deposit kept?"),
    ("The spare key is kept by the", "baker next door", "Who keeps the spare key?"),
    ("The meters are read every", "second Thursday", "When are the meters read?"),
    ("Disputes are heard by the court of", "Maribor", "Which court hears disputes?"),
)
CLAUSES = """\
Use. The premises shall be used for the trade that is named above and for nothing else. A change of trade needs \
consent in writing, which shall not be refused without a reason. Whoever works on the premises shall keep the hours of \
quiet that the town has set, shall store no goods in the passage or on the stairs, and shall leave the gate to the \
yard closed after dusk. Signs may be put up on the front of the building as far as the town permits them, and shall be \
taken down when the agreement ends.

Payment. Payment falls due in advance, on the third working day at the latest, by transfer to the account that is \
named on the invoice. Whoever pays late owes interest from the day on which payment fell due, at the rate that the law \
lays down. A payment is first set against costs, then against interest, and then against the oldest debt. Claims may \
be set off only where they are undisputed or a judge has upheld them. If two payments in succession are not made, the \
agreement may be ended without notice, after a warning that leaves a fortnight to pay what is owed.

Costs of running. Heating, water, refuse, the cleaning of the street and the insurance of the building are shared by \
all who use the building, in the proportion of the areas that they occupy. An account of these costs is drawn up once \
a year and sent before the end of spring, with copies of the bills on request. Objections are raised within three \
months of its receipt. What was paid in advance and not used is paid back; what is missing is paid within a month. \
Costs of administration, of repairs and of empty rooms are not shared.

Repairs. Roof, walls, windows, pipes and the wiring up to the meter are kept in order by the owner of the building. \
Small repairs of parts that are touched every day, such as taps, switches and locks, are paid by whoever uses them, up \
to a limit of one hundred and twenty for each case and of six per cent of a year's payments for all cases together. \
Damage is reported without delay, in writing and, where it can be shown in a picture, with a picture. Whoever fails to \
report damage is liable for what follows from it. Where a defect hinders the trade, payments are lowered in proportion \
for as long as it lasts.

Alterations. Walls are not moved, floors are not loaded beyond what the plan of the building allows, and no machine is \
fixed to the structure without consent. Consent may be tied to the condition that the former state is restored at the \
end. A kiln, an oven or a press with more than nine kilowatts is announced four weeks before it is connected, so that \
the network operator can be asked. Work is done by qualified firms, and the certificates are handed over when it is \
complete. What has been built in at the user's cost may be taken away, unless an adequate sum is offered for it.

Access. The owner, or someone sent by the owner, may enter on a working day between nine and five o'clock, after two \
days' notice, to inspect the building, to carry out repairs or to show the rooms to those who may want to buy or to \
rent them. In an emergency the rooms may be entered at any time; whoever enters then leaves a note that says who came, \
when and why. The chimney is swept twice a year, and the extinguishers are tested every two years; both dates are \
posted on the board in the hallway.

Insurance and liability. Each party insures its own things. The building is insured against fire, storm, hail and \
burst pipes. Goods, tools and finished work are insured by whoever owns them, against theft and against water, for \
their full value. For damage by guests, staff and suppliers, the party is liable that let them in. No one is liable \
for slight negligence, unless life or health is harmed or an essential duty of this agreement is broken.

Neighbours. Noise, dust and smells are kept as low as the state of the art allows. Deliveries by lorry are made before \
noon, and the yard is not used to park vehicles overnight. Water that carries clay, glaze or paint passes through a \
settling tank, which is emptied by whoever uses it, and nothing that is poisonous is led into the drain. Complaints \
are first discussed between those whom they concern, in the presence of someone whom both sides trust, before anyone \
writes to the authorities. Two open days a year are allowed, on which visitors may use the yard and the hallway.

Safety. Exits stay free and their doors unlocked from the inside while anyone works. Gas bottles stand outside, in the \
cage by the north wall. Whoever leaves last turns off the kilns and the lights, looks into every room, and locks the \
gate. Children stay on the premises only with someone who minds them. A list of the substances that are kept, with the \
places where they stand, hangs beside the entrance for the fire brigade and is renewed whenever it changes. Accidents \
are written down in the book that lies in the hallway, even if no one was hurt.

Transfer. The rooms may be shared with another craftsperson for no more than half of their area, if the name of that \
person is given beforehand and no sound reason stands against it. The agreement may be passed on together with the \
business, if the successor takes over all duties and can show that the business will bear them. If the building is \
sold, the buyer takes the seller's place, and everything that is laid down here stays in force.

End. The agreement runs for five years and is extended by a year at a time, unless one of the parties ends it half a \
year before it would run out. At the end the rooms are cleared, swept and handed over with all that belongs to them, \
and a record is made that both parties sign. Walls need not be painted, if they were painted within the last four \
years. What is left behind may be stored for a month at the cost of its owner and be sold after that, and the proceeds \
are paid out after the costs have been taken off.

Last provisions. There are no spoken agreements besides this one. Changes are made in writing, and so is the waiver of \
this form. If a provision is void, the others stay in force, and a valid provision that comes closest to what was \
meant takes its place. Letters reach the parties at the addresses that were last given, on the third day after they \
were posted at the latest. This agreement has been drawn up in two copies, one for each party, both of which have been \
read aloud, understood and signed."""

LOG_FACTS = (
    ("The server listens on port", "8443", "On which port does the server listen?"),
    ("The release is named", "copper kettle", "What is the release named?"),
    ("The certificate was issued by", "Northwind Trust", "Who issued the certificate?"),
    ("The database replica stands in", "Lisbon", "Where does the database replica stand?"),
    ("The nightly backup goes to host", "falcon", "To which host does the nightly backup go?"),
    ("Mail is sent through relay", "heron", "Through which relay is mail sent?"),
    ("The engineer on call is", "Priya Nair", "Who is the engineer on call?"),
    ("Alarms are sent to the channel", "lighthouse", "To which channel are alarms sent?"),
    ("Old logs are deleted after", "nine days", "After how long are old logs deleted?"),
    ("The queue is kept on disk", "basil", "On which disk is the queue kept?"),
)
REQUESTS = 45  # lines of a log after its beginning
PATHS = ("orders", "invoices", "customers", "parcels", "search", "login", "basket", "images")


def write_contract():
    """Write a lease: its particulars, and then clauses that do not name them again."""
    particulars = " ".join(f"{begin} {end}." for begin, end, _ in CONTRACT_FACTS)
    return f"Lease of a workshop\n\nParticulars. {particulars}\n\n{CLAUSES}"


def write_log():
    """Write a server's log: what it says when it starts, and then the requests that it answers."""
    chance, now, lines = Random(0), datetime(2031, 3, 4, 8), []
    for begin, end, _ in LOG_FACTS:
        lines.append(f"{now:%H:%M:%S} start: {begin} {end}.")
        now += timedelta(seconds=1)
    for _ in range(REQUESTS):
        now += timedelta(seconds=chance.randint(1, 40))
        path, number = chance.choice(PATHS), chance.randint(100, 9999)
        status = chance.choices((200, 404, 503), (12, 2, 1))[0]
        lines.append(f"{now:%H:%M:%S} web: GET /{path}/{number} gave {status} in {chance.randint(3, 400)} ms")
    return "\n".join(lines)
