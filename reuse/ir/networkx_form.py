"""A program as graphs of networkx, one for each closure, read off its text; and back."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .parser import parse_program
from .printer import text_to_compare
from .program import Program

if TYPE_CHECKING:
    import networkx

_BODY = re.compile(r"^(.*@([\w.]+)\((.*)\) -> \((.*)\) \{.*)\n((?:  .*\n)*)\}", re.MULTILINE)
_TYPED = re.compile(r"(%[\w.]+): (\S+?)(?=, | =|$)")
_NAMES = re.compile(r"%[\w.]+(?=[^']*(?:'[^']*'[^']*)*$)")  # none in quotes


def to_networkx(program: Program) -> networkx.MultiDiGraph[Any]:
    """Returns the graph of a program; see :meth:`Program.to_networkx`."""
    import networkx as nx

    # The printer has named all values already, so that edges need no second naming.
    text = text_to_compare(program)
    bodies: dict[str, Any] = {}
    for found in _BODY.finditer(text):
        head, name, inputs, results, lines = found.groups()
        graph = nx.MultiDiGraph(name=name, head=head, results=results.split(", "))
        for value, type_ in _TYPED.findall(inputs):
            graph.add_node(value, kind="input", type=type_, text="")
        made = {value: (value, type_) for value, type_ in _TYPED.findall(inputs)}
        for number, line in enumerate(lines.splitlines()):
            _add_line(graph, number, line, made, bodies)
        bodies[name] = graph
    main = bodies.pop("main")
    main.graph.update(structs=text[: text.find("\n\n")] if text[0] == "$" else "", closures=bodies)
    for source, (_, node) in zip(program.sources, main.nodes(data=True), strict=False):
        node["source"] = source
    return main


def _add_line(
    graph: Any, number: int, line: str, made: dict[str, tuple[Any, str]], bodies: dict[str, Any]
) -> None:
    """Adds a node for an operator, a call or what is returned, and an edge for each operand."""
    targets, _, applied = (
        line.strip().rpartition(" = ") if " = " in line else ("", "", line.strip())
    )
    word, *called = re.split(r"[ (@]+", applied)[:2]
    is_call = word == "call"
    graph.add_node(number, kind="call" if is_call else "operator", operator=word, text=line)
    if is_call:
        path = re.search(r"at='((?:[^'\\]|\\.)*)'", applied)
        graph.nodes[number].update(closure=called[0], path=path[1] if path else "")
    for position, name in enumerate(_NAMES.findall(applied)):
        source, type_ = made[name] if name in made else made[name.rpartition(".")[0]]
        graph.add_edge(source, number, value=name, type=type_, position=position)
    types = bodies[called[0]].graph["results"] if is_call else []
    for index, name in enumerate(re.findall(r"%[\w.]+", targets)):
        known = dict(_TYPED.findall(targets)).get(name) or (types[index] if types else "")
        made[name] = number, known


def from_networkx(graph: networkx.MultiDiGraph[Any]) -> Program:
    """Returns the program; see :meth:`Program.from_networkx`."""
    parts = [graph.graph["structs"]]
    for body in (*graph.graph["closures"].values(), graph):
        lines = [text for _, text in body.nodes(data="text") if text]
        parts.append("\n".join([body.graph["head"], *lines, "}\n"]))
    # Texts alone are read, so that edges which somebody changed change nothing.
    program = parse_program("\n".join(parts))
    sources = [source for _, source in graph.nodes(data="source") if source is not None]
    return replace(program, sources=tuple(sources))
