"""What goes wrong in a drawn world."""

from random import Random

from headrace.model.group import Domain
from headrace.sim.faults import (
    Canary,
    ColdCache,
    Crash,
    DomainLoss,
    Drain,
    Fault,
    Leavers,
    RankLoss,
    Reports,
    Restart,
    Slow,
    Starts,
    Update,
)


def faults(rng: Random, replicas: int, span: float) -> tuple[Fault, ...]:
    """Draw at least one fault; each kind is as likely as the others."""
    made: list[Fault] = []
    wanted = rng.sample(("crash", "slow", "reports", "leavers", "restart"), rng.randint(1, 4))
    for kind in sorted(wanted):
        match kind:
            case "crash":
                back = rng.choice((None, 0.05, 2.0))
                made += (
                    Crash(
                        replica=rng.randrange(replicas),
                        at_s=rng.uniform(0, span),
                        noticed_after_s=rng.choice((0.0, 0.2, 1.0)),
                        streams_break=rng.random() < 0.5,
                        back_after_s=back,
                    )
                    for _ in range(rng.randint(1, 2))
                )
            case "slow":
                made.append(Slow(replica=rng.randrange(replicas), factor=rng.uniform(1.5, 5.0)))
            case "reports":
                made.append(
                    Reports(
                        lost=rng.choice((0.0, 0.5, 1.0)),
                        twice=rng.choice((0.0, 0.5)),
                        delay_s=rng.choice((0.0, 0.5, 5.0)),
                    )
                )
            case "leavers":
                share = rng.choice((0.05, 0.3, 1.0))
                made.append(Leavers(share=share, within_s=rng.choice((0.01, 0.5, 5.0))))
            case _:
                made.append(
                    Restart(at_s=rng.uniform(0, span), checkpoint_age_s=rng.choice((0.0, 0.5, 3.0)))
                )
    return tuple(made)


def drains(rng: Random, replicas: int, span: float) -> tuple[Fault, ...]:
    """Draw no replica that is to go, or one or two."""
    return tuple(
        Drain(
            replica=rng.randrange(replicas),
            at_s=rng.uniform(0, span),
            time_s=rng.choice((0.0, 0.5, 5.0, 60.0)),
            back_after_s=rng.choice((None, 0.05, 2.0)),
        )
        for _ in range(rng.choice((0, 0, 1, 2)))
    )


def starts(rng: Random) -> tuple[Fault, ...]:
    """Draw that all starts go well, or how many do not."""
    if rng.random() < 0.4:
        return ()
    share = rng.choice((0.05, 0.15))
    return (Starts(refused=share, never=share, partial=share, lost=share, slow=share, factor=5.0),)


def spells(rng: Random, replicas: int, span: float) -> tuple[Fault, ...]:
    """Draw what lasts for a while, and caches that are dropped; often nothing."""
    made: list[Fault] = []
    at, until = sorted((rng.uniform(0, span), rng.uniform(0, span)))
    if rng.random() < 0.25:
        who = rng.choice((None, rng.randrange(replicas)))
        made.append(Slow(replica=who, factor=rng.uniform(1.2, 5.0), at_s=at, until_s=until + 0.01))
    if rng.random() < 0.25:
        made.append(Reports(lost=1.0, at_s=at, until_s=until + 0.01))
    made += (
        ColdCache(at_s=rng.uniform(0, span), told=rng.random() < 0.5)
        for _ in range(rng.choice((0, 0, 0, 1, 2)))
    )
    return tuple(made)


def losses(rng: Random, span: float) -> tuple[Fault, ...]:
    """Draw what befalls groups of pools that scale; often nothing."""
    made: list[Fault] = []

    def chance() -> bool:
        return rng.random() < 0.25

    noticed, at = rng.choice((0.0, 0.2, 2.0)), rng.uniform(0, span)
    if chance():
        kind, back = rng.choice(tuple(Domain)), rng.choice((None, 1.0, 20.0))
        made.append(DomainLoss(of=kind, at_s=at, noticed_after_s=noticed, back_after_s=back))
    made += (
        RankLoss(
            group=rng.randrange(4),
            at_s=rng.uniform(0, span),
            held=rng.random() < 0.3,
            noticed_after_s=noticed,
            streams_break=rng.random() < 0.5,
            back_after_s=rng.choice((None, 0.5, 10.0)),
        )
        for _ in range(rng.choice((0, 0, 0, 1, 2)))
    )
    if chance():
        made.append(Update(at_s=rng.uniform(0, span), time_s=rng.choice((0.0, 2.0, 30.0))))
    if chance():
        made.append(
            Canary(at_s=rng.uniform(0, span), factor=rng.choice((1.0, 3.0)), correct=chance())
        )
    return tuple(made)


def parts(fault: Fault) -> tuple[str, ...]:
    """Return the kinds of fault that one is, by what it does."""
    if isinstance(fault, Reports):
        named = (("lost", fault.lost), ("twice", fault.twice), ("late", fault.delay_s))
        return tuple(f"report {name}" for name, value in named if value) or ("reports",)
    return (str(fault.__struct_config__.tag),)
