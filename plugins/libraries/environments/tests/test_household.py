"""The household game: what one sees and does, and how an errand is done."""

from __future__ import annotations

import pytest

from jackfield_environments.household import GOALS, OBJECTS, ROOMS, Household


def play(game: Household, *actions: str) -> list[tuple[str, float, bool, bool, dict[str, object]]]:
    return [game.step(action) for action in actions]


def walk(game: Household, seed: int) -> list[str]:
    """Do the errand of a house; return the actions."""
    game.reset(seed=seed)
    actions, ended = list[str](), False
    while not ended:
        action = game.expert()
        assert action in game.actions()
        actions.append(action)
        _, _, terminated, truncated, _ = game.step(action)
        ended = terminated or truncated
    return actions


@pytest.mark.parametrize("rooms", [1, 2, 3, 4])
def test_every_errand_can_be_done(rooms: int) -> None:
    """Searching place by place always finds the object, and the errand can be done."""
    game = Household(rooms=rooms, max_steps=12 + 7 * rooms)
    for seed in range(300):
        walk(game, seed)
        assert game._won, f"seed {seed}"


def test_the_seed_determines_the_house() -> None:
    one, other = Household(), Household()
    assert one.reset(seed=5) == other.reset(seed=5)
    walk(one, 6)
    assert one.reset(seed=5) == other.reset(seed=5), "an earlier episode leaves nothing"
    texts = {Household().reset(seed=seed)[0] for seed in range(50)}
    assert len(texts) > 40


def test_the_goals_and_sizes_are_those_asked_for() -> None:
    states = {"put": "", "clean": "clean ", "heat": "hot ", "cool": "cold "}
    for kind in GOALS:
        goals = {str(Household(goals=[kind]).reset(seed=seed)[1]["goal"]) for seed in range(40)}
        assert all(goal.startswith(f"put the {states[kind]}") for goal in goals)
    game = Household(rooms=4, objects=8)
    game.reset(seed=1)
    assert set(game._places.values()) == set(ROOMS)
    assert set(OBJECTS) == set(game._where)


def test_what_is_not_possible_changes_nothing_and_costs() -> None:
    game = Household(step_rewards=True)
    text, info = game.reset(seed=3)
    [(again, reward, *ended, more)] = play(game, "Dance with the fridge!")
    assert f"That is not possible. {text}" == again
    assert (-0.1, [False, False], False) == (reward, ended, more["possible"])
    assert info["actions"] == more["actions"]


def test_letters_and_full_stops_do_not_matter() -> None:
    game = Household()
    game.reset(seed=3)
    [first, *_] = game.actions()
    [(*_, info)] = play(game, f" {first.upper()}.\n")
    assert info["possible"]


def test_rewards_on_the_way() -> None:
    """0.1 when the object is taken first, and when it is treated first; not again; 1 at the end."""
    game = Household(goals=["heat"], rooms=1, step_rewards=True, max_steps=40)
    actions = walk(game, 11)
    game.reset(seed=11)
    rewards = {action: game.step(action)[1] for action in actions}
    thing = game._thing
    assert 0.1 == pytest.approx(rewards[f"take {thing}"])
    assert 0.1 == pytest.approx(rewards[f"heat {thing}"])
    assert 1.0 == rewards[actions[-1]]
    assert 1.2 == pytest.approx(sum(rewards.values()))
    game.reset(seed=11)
    for action in actions[: actions.index(f"heat {thing}") + 1]:
        game.step(action)
    assert 0.0 == game.step(f"heat {thing}")[1]
    plain = Household(goals=["heat"], rooms=1, max_steps=40)
    plain.reset(seed=11)
    assert [0.0] * (len(actions) - 1) + [1.0] == [plain.step(action)[1] for action in actions]


def test_an_untreated_object_does_not_count() -> None:
    game = Household(goals=["clean"], rooms=1, max_steps=40)
    for seed in range(20):
        game.reset(seed=seed)
        while (action := game.expert(treats=False)) and not action.startswith("put"):
            game.step(action)
        _, reward, terminated, _, info = game.step(action)
        assert (0.0, False, False) == (reward, terminated, info["won"])


def test_one_sees_into_closed_places_only_when_they_are_open() -> None:
    game = Household(rooms=1)
    for seed in range(60):
        game.reset(seed=seed)
        hidden = [name for name, place in game._where.items() if place == "fridge"]
        if hidden:
            break
    _, (closed, *_), (opened, *_) = play(game, "go to table", "go to fridge", "open fridge")
    assert "It is closed." in closed
    assert f"You see {', '.join(hidden)}." in opened


def test_an_errand_ends_at_the_limit_of_steps() -> None:
    game = Household(max_steps=2)
    game.reset(seed=0)
    first, second = play(game, "dance", "dance")
    assert (False, False) == first[2:4]
    assert (False, True) == second[2:4]
    with pytest.raises(RuntimeError):
        game.step("dance")


@pytest.mark.parametrize("settings", [{"rooms": 0}, {"rooms": 5}, {"objects": 9}, {"goals": ["fly"]}, {"goals": []}])
def test_wrong_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"rooms|goals"):
        Household(**settings)  # type: ignore[arg-type]
