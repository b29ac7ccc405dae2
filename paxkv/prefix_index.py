"""Which pages hold the first tokens of sequences that were seen, for later ones to begin with.

A tree: a node is one full page, its children are the pages that came after it, so a path from the
root is the beginning of a sequence. Tokens themselves are compared; there is no hash that two
pages could share. Plain Python: `take_changes` says what the block tables have to be told.

    index = PrefixIndex(page_size=2)
    path = []
    index.extend(path, (7, 8), (5,))  # page 5 holds the tokens 7 and 8
    index.extend(path, (9, 4), (3,))  # page 3 the two after them
    index.release(path)  # the sequence has ended: both pages are reusable
    index.lookup([7, 8, 9, 1, 6])  # the node of page 5, and one token of page 3
"""

import bisect
import collections
import dataclasses
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Self

type Pages = tuple[int, ...]  # one physical page in each layer group


class PrefixKey(NamedTuple):
    """What must be equal besides the tokens for keys and values to be shared."""

    adapter: str | None = None
    revision: str | None = None  # of the model
    salt: str | None = None  # of a tenant, who must not notice what others asked


NO_KEY = PrefixKey()


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """A page full of tokens, after those of its parent."""

    parent: Self | None  # None: a root, which stands before the first page
    tokens: tuple[int, ...]
    pages: Pages
    key: PrefixKey
    children: list[Self] = dataclasses.field(default_factory=list)  # sorted by their tokens
    num_users: int = 0  # running sequences, and pins


class Hit(NamedTuple):
    """What the index has of a sequence's first tokens."""

    nodes: list[Node]  # full pages
    partial: Node | None = None  # the page whose first tokens come next
    num_partial: int = 0  # how many of them

    @property
    def all_nodes(self) -> list[Node]:
        """With the partial one."""
        return [*self.nodes, *([self.partial] if self.partial else [])]


@dataclasses.dataclass(slots=True)
class PageChanges:
    """What the block tables have to be told: pages that the index holds now, or no longer."""

    held: list[Pages] = dataclasses.field(default_factory=list)
    dropped: list[Pages] = dataclasses.field(default_factory=list)
    merged: list[tuple[Pages, Pages]] = dataclasses.field(default_factory=list)  # and the equal one

    def __bool__(self) -> bool:
        return bool(self.held or self.dropped or self.merged)


class PrefixIndex:
    """Full pages by the tokens before and in them; the least recently used are given up first.

    A page that a sequence or a pin uses is never given up, and neither are the pages before it.

    Args:
        page_size: `S`, tokens per page.
        max_pinned_pages: Pages that pins may hold.
    """

    def __init__(self, *, page_size: int, max_pinned_pages: int = 0) -> None:
        self.page_size = page_size
        self.max_pinned_pages = max_pinned_pages
        self.num_pages = 0
        self._roots: dict[PrefixKey, Node] = {}
        # Nodes without users, in the order in which they lost the last one. Who uses a node uses
        # those before it, and a path is released from its end: a node stands before its parent
        # here, so the first of all is a leaf.
        self._idle: collections.OrderedDict[Node, None] = collections.OrderedDict()
        self._pins: dict[tuple[PrefixKey, tuple[int, ...]], list[Node]] = {}
        self._changes = PageChanges()

    @property
    def num_used(self) -> int:
        """Pages that sequences and pins use; the others are reusable."""
        return self.num_pages - len(self._idle)

    def lookup(self, tokens: Sequence[int], key: PrefixKey = NO_KEY) -> Hit:
        """The longest known beginning of a sequence, its last token left out.

        That one is always computed, for what it predicts.
        """
        return self._walk(tokens[:-1], key)

    def use(self, nodes: Iterable[Node]) -> None:
        """Keeps nodes until they are released: a path from its beginning, or what continues one."""
        for node in nodes:
            node.num_users += 1
            self._idle.pop(node, None)

    def release(self, nodes: Sequence[Node]) -> None:
        """Takes back one `use` of each."""
        for node in reversed(nodes):
            node.num_users -= 1
            if not node.num_users:
                self._idle[node] = None

    def extend(
        self, path: list[Node], tokens: tuple[int, ...], pages: Pages, key: PrefixKey = NO_KEY
    ) -> None:
        """Appends its next page, which has been written, to a path in use.

        If the index has an equal page, the path goes on with that one, and block tables are told
        to name it in place of `pages`.
        """
        parent = path[-1] if path else self._roots.setdefault(key, Node(None, (), (), key))
        node, num_equal = _nearest(parent.children, tokens)
        if node is None or num_equal < self.page_size:
            node = Node(parent, tokens, pages, key)
            bisect.insort(parent.children, node, key=_tokens_of)
            self.num_pages += 1
            self._changes.held.append(pages)
        elif node.pages != pages:
            self._changes.merged.append((pages, node.pages))
        self.use([node])
        path.append(node)

    def evict(self, num_pages: int) -> None:
        """Gives up so many pages, the least recently used that nothing uses, or all there are."""
        for _ in range(min(num_pages, len(self._idle))):
            node, _ = self._idle.popitem(last=False)
            self._cut(node)

    def pin(self, tokens: Sequence[int], key: PrefixKey = NO_KEY) -> int:
        """Keeps the full pages of a prefix until `unpin` or `clear`.

        Returns:
            How many tokens they hold.

        Raises:
            ValueError: The index lacks one of them, or pins would hold more pages than they may.
        """
        name = self._pin_name(tokens, key)
        num_pages, nodes = len(name[1]) // self.page_size, self._walk(name[1], key).nodes
        if not num_pages or len(nodes) < num_pages:
            raise ValueError(
                f"a prefix of {len(tokens)} tokens fills {num_pages} pages of {self.page_size}, of "
                f"which the index has {len(nodes)}: only full pages that have been stored can be "
                "pinned"
            )
        num_pinned = len({node for path in (*self._pins.values(), nodes) for node in path})
        if num_pinned > self.max_pinned_pages:
            raise ValueError(
                f"pins would hold {num_pinned} pages and may hold {self.max_pinned_pages}: unpin "
                "other prefixes, lower max_length (one request of that length must fit beside "
                "pins), raise max_pinned_share, or give the KV cache more memory"
            )
        if name not in self._pins:
            self._pins[name] = nodes
            self.use(nodes)
        return len(name[1])

    def unpin(self, tokens: Sequence[int], key: PrefixKey = NO_KEY) -> None:
        """Lets the pages of a pinned prefix be given up again.

        Raises:
            ValueError: It is not pinned.
        """
        nodes = self._pins.pop(self._pin_name(tokens, key), None)
        if nodes is None:
            raise ValueError(
                f"this prefix of {len(tokens)} tokens is not pinned; {len(self._pins)} others are"
            )
        self.release(nodes)

    def clear(self) -> None:
        """Gives up all pages that no sequence uses, pinned ones too."""
        for nodes in self._pins.values():
            self.release(nodes)
        self._pins.clear()
        self.evict(self.num_pages)

    def take_changes(self) -> PageChanges:
        """What the block tables have not been told yet; the caller tells them."""
        changes, self._changes = self._changes, PageChanges()
        return changes

    def nodes(self) -> Iterator[Node]:
        """Every page, parents first."""
        pending = list(self._roots.values())
        while pending:
            node = pending.pop()
            pending += node.children
            if node.parent:
                yield node

    def _walk(self, tokens: Sequence[int], key: PrefixKey) -> Hit:
        nodes, node = [], self._roots.get(key)
        while node:
            begin = len(nodes) * self.page_size
            wanted = tuple(tokens[begin : begin + self.page_size])
            node, num_equal = _nearest(node.children, wanted)
            if node is None or num_equal < self.page_size:
                return Hit(nodes, node if num_equal else None, num_equal)
            nodes.append(node)
        return Hit(nodes)

    def _cut(self, leaf: Node) -> None:
        assert leaf.parent is not None, "a root is never idle"
        siblings = leaf.parent.children
        del siblings[bisect.bisect_left(siblings, leaf.tokens, key=_tokens_of)]
        if not siblings and leaf.parent.parent is None:
            del self._roots[leaf.key]  # keys may be many, and come once
        self.num_pages -= 1
        self._changes.dropped.append(leaf.pages)

    def _pin_name(self, tokens: Sequence[int], key: PrefixKey) -> tuple[PrefixKey, tuple[int, ...]]:
        return key, tuple(tokens[: len(tokens) - len(tokens) % self.page_size])


_tokens_of = operator.attrgetter("tokens")


def _nearest(children: list[Node], tokens: tuple[int, ...]) -> tuple[Node | None, int]:
    """The child that begins most like `tokens`, and how many of them it has.

    Those with an equal beginning stand side by side, so it is one of two neighbours.
    """
    place = bisect.bisect_left(children, tokens, key=_tokens_of)
    neighbours = [
        (child, common_length(child.tokens, tokens))
        for child in children[max(place - 1, 0) : place + 1]
    ]
    return max(neighbours, key=operator.itemgetter(1), default=(None, 0))


def common_length(these: Sequence[int], those: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    return sum(1 for _ in itertools.takewhile(bool, map(operator.eq, these, those)))
