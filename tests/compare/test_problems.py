"""A problem of few fields, and what another process gets."""

import pickle

from fedprompt.compare import Problem
from fedprompt.compare.rows import Row
from fedprompt.compare.trials import Machine


def test_a_problem_has_the_defaults_of_its_description():
    problem = Problem(title="Digits", partitions={"iid": "60 images"}, rows=list, make=dict)
    assert (problem.name, problem.tuned_on, problem.trials, problem.again) == ("", None, None, None)
    assert problem.columns == {
        "full": "all test images", "own": "own mix", "worst": "worst client",
    }  # fmt: skip
    assert (problem.references, problem.compared, problem.every) == ({}, ("own",), False)
    row = Row.of("local")
    assert problem.family("iid") == "one model"
    assert (problem.causes("iid", row), problem.last_rounds("iid", row)) == (None, 1)
    assert (problem.notes(problem, [], "iid"), problem.inputs("iid", Machine())) == ((), {})


def same():
    return "the problem of another process"


def test_a_problem_is_sent_as_the_function_that_makes_it():
    fields = {"title": "", "partitions": {}, "rows": list, "make": dict}
    assert pickle.loads(pickle.dumps(Problem(**fields, again=same))) == same()
    functions = ("family", "causes", "last_rounds", "inputs")
    plain = pickle.loads(pickle.dumps(Problem(**fields, **dict.fromkeys(functions, max))))
    assert (plain.title, plain.rows, plain.family) == ("", list, max)
