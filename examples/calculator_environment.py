"""Environments of your own: problems to solve with a calculator.

The guide docs/episodes.md explains it.

    python -m maxrl_fast.train --task gsm8k --model DIR --max-turns 8 --max-new-tokens 1024
        --environment examples/calculator_environment.py:Calculator
        --prompt-suffix " Submit the number."
"""

import ast
import operator

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


class Calculator:
    """The reward is 1 if the last number that was submitted is the answer of the line."""

    def reset(self, answer: str, **columns: object) -> None:
        self.answer, self.submitted = float(answer), None

    def calculate(self, expression: str) -> float:
        """
        Evaluate an arithmetic expression.

        Args:
            expression: Numbers, + - * / and parentheses, such as (3 + 4) / 2.

        Returns:
            The value.
        """
        return value(ast.parse(expression, mode="eval").body)

    def submit(self, number: float) -> str:
        """
        Give the final answer.

        Args:
            number: The answer.
        """
        self.submitted = float(number)
        return "Submitted."

    def get_reward(self) -> float:
        return float(self.submitted == self.answer)


def value(node: ast.expr) -> float:
    """Return the value of an expression of numbers and four operators."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
    if isinstance(node, ast.BinOp | ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](*map(value, parts))
    raise ValueError("an expression has numbers, + - * / and parentheses")
