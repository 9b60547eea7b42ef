"""Rewards by majority vote: against a count by hand, in groups, and in a run whose evaluation keeps
its own rewards.
"""

from maxrl_fast.rewards.combined import MajorityVote


def votes(responses, group):
    rows = [{"prompt": "", "response": response} for response in responses]
    return MajorityVote(lambda text: text.strip()).score(rows, group=group).rewards


def test_the_most_frequent_answer_of_each_group_is_right():
    assert votes(["3", "4", "3 ", "", "4", "4", "4", "3"], 4) == [1, 0, 1, 0, 1, 1, 1, 0]
    assert votes(["1", "2", "2", "1"], 4) == [1, 0, 0, 1]  # of a tie, the answer sampled first
    assert votes(["", "", ""], 3) == [0, 0, 0]  # no answer gets no vote
    assert votes(["", "", "5"], 3) == [0, 0, 1]
    assert votes(["7", ""], 1) == [1, 0]  # a group of one agrees with itself
