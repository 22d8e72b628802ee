"""The status for people: jobs.status on one screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jobs.status import Cluster, Endpoint, Registered, Status, Training


def screen(found: Status, target: str) -> list[str]:
    """The status for people, a part a paragraph."""
    lines: list[str] = []

    def part(name: str, told: list[str]) -> None:
        told = told or [found.missing[name]]
        lines.extend(f"{name if number == 0 else '':10}{line}" for number, line in enumerate(told))

    part("cluster", cluster_lines(found.cluster) if found.cluster else [])
    part("endpoint", endpoint_lines(found.endpoint, found.registry or {}) if found.endpoint else [])
    if found.registry == {}:
        part("registry", [f"no alias of {target}'s drafters is set: python -m jobs.promote"])
    else:
        part("registry", [version_line(*each) for each in (found.registry or {}).items()])
    part("training", training_lines(found.training) if found.training else [])
    return lines


def cluster_lines(found: Cluster) -> list[str]:
    used = {name: found.total[name] - found.free.get(name, 0.0) for name in found.total}
    lines = [
        f"{len(found.nodes)} nodes, {used['CPU']:g} of {found.total['CPU']:g} CPUs and "
        f"{used['GPU']:g} of {found.total['GPU']:g} GPUs taken, object store {found.total['object_store_memory']:g} GB"
    ]
    lines += [
        f"  {address}: {node['CPU']:g} CPUs, {node['GPU']:g} GPUs, {node['memory']:g} GB"
        for address, node in found.nodes.items()
    ]
    return lines + [f"  job {entrypoint}" for entrypoint in found.running or ["none is running"]]


def endpoint_lines(found: Endpoint, aliases: dict[str, Registered]) -> list[str]:
    replicas = ", ".join(f"{count} {state.lower()}" for state, count in found.replicas.items() if count)
    names = [alias for alias, registered in aliases.items() if registered.version == found.live]
    lines = [f"{found.status} at {found.url}" + (f", replicas: {replicas}" if replicas else "")]
    if found.message:
        lines.append(f"  {found.message}")
    if found.live:
        called = f" ({', '.join(names)})" if names else ""
        lines.append(f"  drafter version {found.live}{called} live")
    if found.requests:
        lines.append("  requests " + ", ".join(f"{count} {name}" for name, count in found.requests.items()))
    return lines + ([f"  problem: {found.problem}"] if found.problem else [])


def version_line(alias: str, found: Registered) -> str:
    tau = ", ".join(f"τ {value:.2f} on {name}" for name, value in found.tau.items())
    speedup = f", {found.speedup:.2f}× plain" if found.speedup is not None else ""
    canary = f", canary {found.canary}" if found.canary else ""
    return f"{alias} is version {found.version}: gate {found.gate}{f', {tau}' if tau else ''}{speedup}{canary}"


def training_lines(found: Training) -> list[str]:
    metrics = found.metrics
    lines = [f"{found.name}: {found.state}, last heard of {found.seconds_ago:,.0f} s ago"]
    if "final_loss" in metrics:
        tau = f", τ {found.tau:.2f} measured" if found.tau is not None else ""
        lines.append(
            f"  step {metrics['step']:.0f} of {found.total_steps}, loss {metrics['final_loss']:.3f}, "
            f"{metrics['final_accepted']:.2f} tokens a round (teacher-forced){tau}"
        )
    if "offered_tokens_per_s" in metrics:
        lines.append(
            f"  supply {metrics['offered_tokens_per_s']:,.0f} tokens/s, demand "
            f"{metrics['demand_tokens_per_s']:,.0f}, trained {metrics['tokens_per_s']:,.0f}"
        )
    return lines + ([f"  {found.balance}"] if found.balance else [])
