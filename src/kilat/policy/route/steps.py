"""StepTimes: what the parts of a worker's steps cost, told apart from sums over many steps of all kinds."""

KEPT = 0.97
"""Of the weight of older measurements, with each new one."""
SWEEPS = 30
STAY = 0.001
"""How much the last solution counts, beside all intervals."""


class StepTimes:
    """Seconds of a step: a start, each token of a prompt, and each session that decodes; all 0 while nothing is known.

    Only sums over an interval are seen, and a step with a chunk of a prompt decodes too. So the three are those that explain all
    intervals best: least squares, newer intervals counting more, nothing below 0. What the intervals cannot tell apart stays near what
    it was. At first all the time is that of prompt tokens, or without any that of the start.
    """

    def __init__(self) -> None:
        self._parts = [0.0, 0.0, 0.0]
        self._sums = [[0.0] * 3 for _ in range(3)]
        self._totals = [0.0, 0.0, 0.0]

    def measured(self, n_steps: float, n_prompt: float, n_rows: float, seconds: float) -> None:
        """So many steps with so many prompt tokens and rows that decode took ``seconds`` together."""
        counts = (n_steps, n_prompt, n_rows)
        for i, n in enumerate(counts):
            self._totals[i] = KEPT * self._totals[i] + n
            self._sums[i] = [KEPT * old + n * m / seconds for old, m in zip(self._sums[i], counts)]
        before, parts = tuple(self._parts), self._parts
        for _ in range(SWEEPS):  # one part after another, which for sums of squares comes to an end
            for i in (1, 0, 2):
                row = self._sums[i]
                if row[i] > 0:
                    left = self._totals[i] - sum(row[j] * parts[j] for j in range(3) if j != i)
                    parts[i] = max((left / row[i] + STAY * before[i]) / (1 + STAY), 0.0)

    @property
    def prompt_tokens_per_s(self) -> float:
        """Of computing prompts alone; 0 while not known."""
        return 1 / self._parts[1] if self._parts[1] > 0 else 0.0

    @property
    def row_s(self) -> float:
        """What one more session adds to a step."""
        return self._parts[2]

    def decode_s(self, n_rows: float) -> float:
        """A step that decodes so many sessions and nothing else."""
        return self._parts[0] + self._parts[2] * n_rows

    def seconds(self, n_steps: float, n_prompt: float, n_rows: float) -> float:
        """What so many steps with so many prompt tokens and rows take; 0 while nothing is known."""
        return sum(n * part for n, part in zip((n_steps, n_prompt, n_rows), self._parts))
