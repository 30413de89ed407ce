"""A text game of errands in a house, in the manner of ALFWorld. It needs only the standard library.

An object is somewhere in a house of a few rooms, perhaps in something closed. It has to be found, perhaps cleaned,
heated or cooled, and put where the goal says. Texts are short and of few words, so that tiny models can learn it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

#: The places of each room. The kitchen is in every house, as things are cleaned, heated and cooled there.
ROOMS = {
    "kitchen": ("table", "sink", "stove", "fridge", "cabinet"),
    "bedroom": ("bed", "desk", "drawer"),
    "bathroom": ("shelf", "basket"),
    "hall": ("bench", "chest"),
}
CLOSED = ("fridge", "cabinet", "drawer", "chest")  #: must be opened before one sees what is in them
OBJECTS = ("cup", "plate", "bowl", "apple", "egg", "book", "pen", "towel")
#: What can be done to an object, where, and the word for its state then.
TREATMENTS = {"clean": ("sink", "clean"), "heat": ("stove", "hot"), "cool": ("fridge", "cold")}
GOALS = ("put", *TREATMENTS)
_TOGETHER = 0.1  #: reward for each step on the way, with ``step_rewards``

Result = tuple[str, float, bool, bool, dict[str, Any]]


class Household:
    """A house with one errand, which ``seed`` determines.

    ``rooms`` (1 to 4) and ``objects`` (1 to 8) say how large it is; ``goals`` are some of ``put``, ``clean``, ``heat``
    and ``cool``. The reward is 1 when the errand is done; with ``step_rewards`` also 0.1 when the object is first
    taken and when it is first treated, and -0.1 for what is not possible. With ``notes`` the text says where one has
    looked, so that it is all that one has to know. ``info`` has the possible ``actions``, the ``goal``, whether the
    action was ``possible`` and whether the errand is done (``won``).
    """

    def __init__(
        self,
        rooms: int = 2,
        objects: int = 4,
        goals: Sequence[str] = GOALS,
        max_steps: int = 30,
        step_rewards: bool = False,
        notes: bool = True,
    ) -> None:
        if not 1 <= rooms <= len(ROOMS) or not 1 <= objects <= len(OBJECTS):
            raise ValueError(f"a house has 1 to {len(ROOMS)} rooms and 1 to {len(OBJECTS)} objects")
        if not goals or (unknown := set(goals) - set(GOALS)):
            raise ValueError(f"goals are {', '.join(GOALS)}, not {', '.join(sorted(unknown)) if goals else 'none'}")
        self._rooms, self._objects, self._goals, self._max_steps = rooms, objects, tuple(goals), max_steps
        self._step_rewards, self._notes = step_rewards, notes

    # -- the environment

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Make the house of a seed, and return what one sees."""
        rng = random.Random(seed)
        rooms = ["kitchen", *rng.sample([room for room in ROOMS if room != "kitchen"], self._rooms - 1)]
        self._places = {place: room for room in rooms for place in ROOMS[room]}
        names = rng.sample(OBJECTS, self._objects)
        self._thing, self._kind = names[0], rng.choice(self._goals)
        self._where = {name: rng.choice(list(self._places)) for name in names}  #: place of each object; none: carried
        others = [place for place in self._places if place != self._where[self._thing]]
        self._target = rng.choice(others)
        self._state = dict.fromkeys(names, "")
        self._open: set[str] = set()
        self._known: dict[str, str] = {}  #: where one has last seen each object
        self._searched: list[str] = []
        self._room, self._place, self._steps = rng.choice(rooms), "", 0
        self._reached: set[str] = set()
        self._won = False
        self._look()
        return self._text(), self._info(True)

    def step(self, action: str) -> Result:
        """Do something: go, open, take, put, clean, heat or cool."""
        if self._won or self._steps >= self._max_steps:
            raise RuntimeError("the errand has ended: reset the house")
        words = action.lower().replace(".", " ").split()
        possible = " ".join(words) in self.actions()
        self._steps += 1
        before = len(self._reached)
        if possible:
            self._do(words)
        self._look()
        state = TREATMENTS[self._kind][1] if self._kind in TREATMENTS else ""
        self._won = self._where[self._thing] == self._target and state in ("", self._state[self._thing])
        reward = float(self._won)
        if self._step_rewards:
            reward += _TOGETHER * (len(self._reached) - before) - (0.0 if possible else _TOGETHER)
        text = self._text() if possible else f"That is not possible. {self._text()}"
        return text, reward, self._won, not self._won and self._steps >= self._max_steps, self._info(possible)

    def close(self) -> None:
        """Do nothing: nothing is open."""

    # -- for programs

    @property
    def goal(self) -> str:
        """The errand in words."""
        state = f"{TREATMENTS[self._kind][1]} " if self._kind in TREATMENTS else ""
        return f"put the {state}{self._thing} {_at(self._target)}"

    def actions(self) -> list[str]:
        """Return everything that is possible now."""
        here = [place for place, room in self._places.items() if room == self._room and place != self._place]
        rooms = [room for room in dict.fromkeys(self._places.values()) if room != self._room]
        found = [f"go to {name}" for name in (*here, *rooms)]
        carried = self._carried
        if self._place in CLOSED and self._place not in self._open:
            found.append(f"open {self._place}")
        elif self._place:
            found += [f"take {name}" for name in self._here() if not carried]
            found += [f"put {carried} {_at(self._place)}"] if carried else []
        if carried:
            found += [f"{verb} {carried}" for verb, (place, _) in TREATMENTS.items() if place == self._place]
        return found

    def expert(self, *, treats: bool = True) -> str:
        """Return the next action of someone who searches place by place and knows what to do.

        Without ``treats``, it forgets to clean, heat or cool.
        """
        if self._carried == self._thing:
            state = TREATMENTS[self._kind][1] if treats and self._kind in TREATMENTS else ""
            if state and self._state[self._thing] != state:
                place = TREATMENTS[self._kind][0]
                return f"{self._kind} {self._thing}" if self._place == place else self._towards(place)
            return self._use(self._target, f"put {self._thing} {_at(self._target)}")
        if self._carried:
            return f"put {self._carried} {_at(self._place)}" if self._place else self._towards(next(iter(self._nearby)))
        place = self._known.get(self._thing) or next(
            (place for place in (*self._nearby, *self._places) if place not in self._searched), self._place
        )
        return self._use(place, f"take {self._thing}")

    # -- inside

    @property
    def _carried(self) -> str:
        return next((name for name, place in self._where.items() if not place), "")

    @property
    def _nearby(self) -> list[str]:
        return [place for place, room in self._places.items() if room == self._room]

    def _here(self) -> list[str]:
        if not self._place or (self._place in CLOSED and self._place not in self._open):
            return []
        return [name for name, place in self._where.items() if place == self._place]

    def _look(self) -> None:
        if not self._place or (self._place in CLOSED and self._place not in self._open):
            return
        if self._place not in self._searched:
            self._searched.append(self._place)
        self._known = {name: place for name, place in self._known.items() if place != self._place}
        self._known |= dict.fromkeys(self._here(), self._place)

    def _do(self, words: list[str]) -> None:
        verb, name = words[0], words[1]
        if verb == "go":
            name = words[2]
            self._room, self._place = (name, "") if name in ROOMS else (self._room, name)
        elif verb == "open":
            self._open.add(name)
        elif verb == "take":
            self._where[name] = ""
            self._known.pop(name, None)
            self._reach(name, "taken")
        elif verb == "put":
            self._where[name] = self._place
        else:
            self._state[name] = TREATMENTS[verb][1]
            if verb == self._kind:
                self._reach(name, "treated")

    def _reach(self, name: str, what: str) -> None:
        if name == self._thing:
            self._reached.add(what)

    def _towards(self, place: str) -> str:
        return f"go to {place if self._places[place] == self._room else self._places[place]}"

    def _use(self, place: str, action: str) -> str:
        if self._place != place:
            return self._towards(place)
        return f"open {place}" if place in CLOSED and place not in self._open else action

    def _text(self) -> str:
        closed = self._place in CLOSED and self._place not in self._open
        where = f"in the {self._room}" + (f" {_by(self._place)}" if self._place else "")
        carried = self._carried
        held = f"the {self._state[carried]} {carried}".replace("  ", " ") if carried else "nothing"
        parts = [f"Goal: {self.goal}.", f"You are {where}.", f"You carry {held}."]
        if self._place:
            parts.append("It is closed." if closed else f"You see {_list(self._here())}.")
        parts.append(f"Near: {_list([place for place in self._nearby if place != self._place])}.")
        rooms = [room for room in dict.fromkeys(self._places.values()) if room != self._room]
        parts += [f"Rooms: {_list(rooms)}."] if rooms else []
        if self._notes and not carried:
            known = self._known.get(self._thing)
            found = f"Found: {known} in the {self._places[known]}." if known else ""
            parts.append(found or f"Searched: {_list(self._searched)}.")
        return " ".join(parts)

    def _info(self, possible: bool) -> dict[str, Any]:
        return {"actions": self.actions(), "goal": self.goal, "won": self._won, "possible": possible}


def _at(place: str) -> str:
    return f"in the {place}" if place in (*CLOSED, "sink", "basket") else f"on the {place}"


def _by(place: str) -> str:
    return f"at the {place}"


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"
