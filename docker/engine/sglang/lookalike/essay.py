"""Long text on any subject: paragraphs of different sentences, so that it reads as real prose."""

from __future__ import annotations

import random
import re

OPENINGS = [
    "There is more to say about {topic} than first meets the eye.",
    "Any honest account of {topic} has to begin with ordinary people and ordinary days.",
    "When we think about {topic}, it helps to start with something small and concrete.",
    "Few subjects reward patience as much as {topic}.",
]
TOPICS: dict[str, tuple[str, str]] = {
    "sea": (
        "sea ocean water coast ship sailor tide fish river lighthouse boat wave",
        """Before sunrise the harbour smells of salt, diesel and wet rope.
Small boats leave in single file, their lamps swinging as they pass the breakwater.
An old pilot once told me that the water remembers every storm and forgives none of them.
Currents carry warm streams northward, softening winters on coasts that ought to be frozen.
Beneath the surface, whales call to one another across distances larger than some countries.
The tide tables pinned to the café wall are consulted more often than any newspaper.
Children learn early which rocks are slippery and which inlets fill without warning.
By noon the gulls have found the returning nets and argue loudly over scraps.
Lighthouse keepers used to write down the weather each hour, even when nothing changed.
Those ledgers now help scientists measure how quickly the climate is shifting.
A ship built of steel still depends on judgement, because charts grow old and sandbars move.
In the evening the whole bay turns copper, then violet, then a deep and quiet grey.""",
    ),
    "computing": (
        "computer machine program software gpu model network data algorithm code internet server "
        "language intelligence technology science",
        """Early machines filled entire rooms and were programmed by rewiring their panels.
Each generation since then has hidden one more layer of detail behind a simpler promise.
A compiler, for instance, lets its author think in terms of ideas instead of registers.
Networks joined isolated systems together, and suddenly distance mattered less than bandwidth.
Graphics processors were designed to draw triangles, yet they turned out to be superb at algebra.
Training a large model means adjusting billions of numbers until its predictions improve.
Memory is usually the scarce resource, so engineers spend their days moving bytes wisely.
Good software is tested against the failures its makers can imagine and a few they cannot.
Logs, metrics and careful alarms turn a mysterious outage into an ordinary afternoon of repair.
Security adds another discipline: every input is treated as a guess about the truth.
Open standards allow strangers to cooperate without ever holding a meeting.
Perhaps the finest tools are those that disappear while we concentrate on our own work.""",
    ),
    "garden": (
        "garden plant tree flower forest nature farm soil season spring summer autumn winter "
        "animal bird green",
        """A gardener begins with soil, turning it over gently to let in air and light.
Compost made from kitchen peelings feeds worms, and the worms in turn feed everything else.
Peas climb whatever they can reach, while pumpkins prefer to wander along the ground.
Bees arrive on the first mild morning and work the crocuses with great seriousness.
Rain at the right moment is worth more than any fertilizer sold in a sack.
Fruit trees ask for patience, since the best harvest comes years after planting.
Slugs, blackbirds and late frost all claim their share, so wise growers sow extra.
Old roses have a scent that modern hybrids rarely match.
In August the beds overflow, and neighbours exchange baskets across the fence.
Autumn brings a different pleasure: raking leaves, saving seeds, sharpening the tools.
Snow finally covers the paths and gives both plants and people permission to rest.
Meanwhile, beneath that white blanket, bulbs are already preparing their quiet return.""",
    ),
    "city": (
        "city town street building travel train bridge market architecture house people history "
        "europe paris london berlin",
        """Cities grow the way coral does, one patient layer resting upon another.
The oldest streets follow paths that cattle once took down to the river.
Railway stations became the cathedrals of the nineteenth century, all iron, glass and steam.
Markets open early, and the first customers are cooks who know exactly what they want.
Bridges change a neighbourhood more thoroughly than any law passed in the council chamber.
Behind plain façades there are courtyards where somebody always practises the violin.
Planners argue about traffic, yet a bench in the shade may be the better investment.
Immigrants bring recipes, songs and trades that later generations call traditional.
Libraries remain warm in winter and ask nothing of the visitor except a little silence.
At night the office towers empty, and cleaners move through the lit floors like astronauts.
Every map is outdated by the time it is printed, which keeps cartographers employed.
What endures is the habit of living close together and finding ways to manage it.""",
    ),
    "food": (
        "food bread kitchen cook meal eat recipe baker tea coffee cheese wine bakery",
        """Bread needs only flour, water, salt and time, although the last is hardest to find.
A sourdough starter is a small household animal that must be fed before breakfast.
Bakers judge their dough by touch, pressing with a knuckle and watching it recover.
Spices once travelled for months by caravan and were weighed out like silver.
Coffee reached many ports together with newspapers, and the two have kept company ever since.
Soup forgives nearly every mistake, provided the cook keeps tasting.
Grandmothers measure by handfuls and by memory, leaving historians to guess at the grams.
Cheese is milk that has learned to wait, in cellars where the temperature never hurries.
A shared table settles quarrels that letters only make worse.
Street vendors can read a crowd as accurately as any economist.
Freshness matters, yet preserving was the invention that let villages survive the winter.
Dessert, finally, exists for no practical reason at all, which is precisely its charm.""",
    ),
    "mountain": (
        "mountain hill climb snow rock valley hike adventure journey story dragon hero robot moon "
        "space star planet",
        """The path started behind the chapel and rose so steeply that conversation soon stopped.
Our guide carried a coil of red rope, two apples and an alarming amount of optimism.
Above the last pines the wind found us, tugging at hoods and stealing half of every sentence.
Marmots whistled from the scree as though announcing strangers to an invisible court.
Near the ridge we met a shepherd whose dog inspected each boot in turn.
She pointed toward a notch in the skyline and said that the weather lived there.
Clouds gathered by early afternoon, exactly as her grandfather had promised they would.
We crossed the glacier slowly, listening to meltwater muttering under the ice.
From the summit one could see three countries and none of their borders.
Nobody spoke for several minutes; even the most talkative among us simply looked.
Going down proved harder on the knees but easier on the heart.
That evening, in the crowded hut, every traveller told the same tale in a different way.""",
    ),
}
LINKS = ["", "Seen from another side, things look different. ", "Consider a neighbouring example. ",
         "The wider picture is instructive too. ", "Another scene comes to mind. ",
         "One comparison is hard to resist. "]  # fmt: skip

LENGTH = re.compile(r"\b(?:in )?(?:about |at least |roughly |around )?(\d+)[ -]words?\b", re.I)


def topic_of(prompt: str) -> str:
    """The words after "about" or "on", else something neutral."""
    prompt = LENGTH.sub("", prompt)
    m = re.search(r"\b(?:about|on|of)\s+((?:[\w'-]+ ?){1,6})", prompt, re.I)
    return m[1].strip().lower() if m else "this question"


def write(prompt: str, seed: int) -> str:
    """Some 900 words: the subject that fits best first, then the others in an order of the seed."""
    words = set(re.findall(r"[a-z]+", prompt.lower()))
    order = list(TOPICS)
    chance = random.Random(seed)
    chance.shuffle(order)
    order.sort(key=lambda name: -len(words & set(TOPICS[name][0].split())))
    text = [chance.choice(OPENINGS).format(topic=topic_of(prompt))]
    for i, name in enumerate(order):
        lines = TOPICS[name][1].splitlines()
        half = len(lines) // 2
        text.append(("\n\n" + LINKS[i] if i else " ") + " ".join(lines[:half]))
        text.append("\n\n" + " ".join(lines[half:]))
    whole = "".join(text)
    end = f"\n\nThat, in short, is why {topic_of(prompt)} deserves attention."
    asked = LENGTH.search(prompt)
    if asked and 30 <= int(asked[1]) < len(whole.split()):
        last = list(re.finditer(r"\S+", whole))[int(asked[1]) - 1].end()
        whole = whole[: whole.find(".", last - 1) + 1]
    return whole + end
