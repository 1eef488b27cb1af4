"""The text that the embedded model is pre-trained on, all of it made here from templates.

Three kinds of documents:

- incidents: a device-log line in which one event comes of another, then notes that speak of the events by name;
- who looks after what: sentences in which the words that later serve as labels stand beside events, without any log line;
- status sentences in plain English.

Sentence patterns come from the `corpus` lists of `device_logs.json`; those of the fine-tuning data come from its `train` and `held_out`
lists. No pattern is in two of them. No document has a log line together with a label, and the prompt `Fault:` occurs nowhere.
"""

import json
import random
from pathlib import Path

WORDS = json.loads((Path(__file__).parents[2] / "pipeline/zofo/assets/embedded/device_logs.json").read_text())
CLASSES = WORDS["classes"]
EVENTS = [event for c in CLASSES for event in c["events"]]
PARTS = {name: lists["corpus"] for name, lists in WORDS["parts"].items()}

CAUSE_NOTES = ["Work: {c}.", "Began with {c}.", "{c} came first."]
EFFECT_NOTES = ["Seen: {e}.", "Ended with {e}.", "{e} came last."]
EXCLUDED_NOTES = ["False alarm: {x}.", "{x} did not happen."]
PLACES = ["north gate", "old mill", "pump house", "yard", "hall two", "roof", "tunnel", "bridge", "depot", "river lock"]
SHIFTS = ["night", "day", "early", "late"]
STATES = ["closed", "open", "waiting", "done"]
STATUS = [
    "The {d} at the {p} sends a report every {n} minutes.", "All devices in the {p} were checked today.", "The {s} shift starts at {t}.",
    "A new {d} was set up near the {p}.", "Please restart the {d} before {t}.", "The {p} has {n} devices and {n} of them are new.",
    "We replaced the {d} at the {p} last week.", "Nobody was at the {p} in the {s} shift.", "The {w} desk is open until {t}.",
    "The {w} desk has {n} open tickets.", "The {d} of the {p} is quiet since {t}.", "Write the id of the {d} on the form.",
]


class Corpus:
    def __init__(self, seed: int):
        self.r = random.Random(seed)

    def hex(self) -> str:
        return "".join(self.r.choice("0123456789abcdef") for _ in range(4))

    def time(self) -> str:
        return f"{self.r.randrange(24):02}:{self.r.randrange(60):02}"

    def header(self) -> str:
        """Most lines have a short one: nothing in it can be foreseen, so it teaches little for its length."""
        level = self.r.choice(PARTS["levels"])
        if self.r.random() < 0.7:
            return f"{level} "
        seconds = f":{self.r.randrange(60):02}" if self.r.random() < 0.5 else ""
        return f"{self.time()}{seconds} {self.r.choice(PARTS['devices'])}-{self.hex()} {level} "

    def typo(self, text: str) -> str:
        out = []
        for word in text.split(" "):
            if len(word) > 4 and word.isalpha() and self.r.random() < 0.01:
                i = self.r.randrange(1, len(word) - 1)
                word = word[:i] + word[i + 1] + word[i] + word[i + 2 :] if self.r.random() < 0.5 else word[:i] + word[i + 1 :]
            out.append(word)
        return " ".join(out)

    def event(self, name: str) -> str:
        kind = self.r.randrange(5)
        if kind < 2:
            return f"{self.r.choice(PARTS['manners'])} {name}"
        if kind == 2:
            return f"E{self.r.randrange(10, 100)} {name}"
        return f"{name} (x{self.r.randrange(2, 10)})" if kind == 3 else name

    def aside(self) -> str:
        text = self.r.choice(PARTS["asides"])
        return text.replace("{t}", self.time()).replace("{h}", self.hex()).replace("{d}", str(self.r.randrange(2, 100)))

    def clauses(self, main: list[str], asides: int | bool) -> str:
        """The clauses in random order, joined at random."""
        clauses = main + [self.aside() for _ in range(asides)]
        self.r.shuffle(clauses)
        text = clauses[0]
        for clause in clauses[1:]:
            text += self.r.choice(PARTS["joins"]) + clause
        return text

    def end(self) -> str:
        kind = self.r.randrange(4)
        if kind == 0:
            return f"\nShift: {self.r.choice(SHIFTS)}"
        if kind == 1:
            return f"\nState: {self.r.choice(STATES)}"
        if kind == 2:
            return f"\nPlace: {self.r.choice(PLACES)}"
        return ""

    def incident(self, plain: bool) -> str:
        c, e, x = self.r.sample(EVENTS, 3)
        event = (lambda name: name) if plain else self.event
        main = [self.r.choice(PARTS["newest_first" if self.r.random() < 0.75 else "oldest_first"]).replace("{c}", event(c)).replace("{e}", event(e))]
        notes = [self.r.choice(CAUSE_NOTES).replace("{c}", c), self.r.choice(EFFECT_NOTES).replace("{e}", e)]
        if self.r.random() < (0.2 if plain else 0.6):
            main.append(self.r.choice(PARTS["exclusions"]).replace("{x}", event(x)))
            notes.append(self.r.choice(EXCLUDED_NOTES).replace("{x}", x))
        line = self.clauses(main, not plain and self.r.random() < 0.3)
        self.r.shuffle(notes)
        return (self.header() if not plain else "INFO ") + (line if plain else self.typo(line)) + "\n" + " ".join(notes) + ("" if plain else self.end())

    def glossary(self) -> str:
        c = self.r.choice(CLASSES)
        names = self.r.sample(c["events"], 3)
        word = c["word"]
        return self.r.choice(
            [
                f"The {word} desk handles {names[0]}, {names[1]} and {names[2]}.",
                f"For {names[0]} or {names[1]} call the {word} desk.",
                f"{names[0]} and {names[1]} are {word} matters, and so is {names[2]}.",
                f"{names[0]}: ask {word}. {names[1]}: ask {word}.",
                f"If you find {names[0]}, ask for {word}.",
            ]
        )

    def status(self) -> str:
        sentences = self.r.sample(STATUS, self.r.randrange(1, 4))
        out = []
        for s in sentences:
            s = s.replace("{d}", self.r.choice(PARTS["devices"])).replace("{p}", self.r.choice(PLACES)).replace("{s}", self.r.choice(SHIFTS))
            s = s.replace("{t}", self.time()).replace("{w}", self.r.choice(CLASSES)["word"])
            while "{n}" in s:
                s = s.replace("{n}", str(self.r.randrange(2, 60)), 1)
            out.append(s)
        return " ".join(out) + self.end()

    def document(self, first: bool = False) -> str:
        """A document; the `first` ones are short incidents alone, because reading who did what is learnt slowly."""
        kind = self.r.random()
        if first or kind < 0.6:
            return self.incident(plain=first or self.r.random() < 0.4)
        return self.glossary() if kind < 0.9 else self.status()


if __name__ == "__main__":
    import sys

    corpus = Corpus(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    for _ in range(int(sys.argv[1])):
        print(corpus.document(), end="\n\n")
