"""Methods of the gallery, and your own, on your images under one budget.

``python -m fedprompt.compare FOLDER --vit NAME --methods fedprox,fedvpt`` reads a folder of images,
divides it over clients, runs the methods next to training alone, and writes tables and a picture.
In Python::

    from fedprompt import compare

    problem = compare.folder("photos", vit="vit_base_patch16_224", clients="dirichlet:0.3:10")
    results = compare.run(problem, ["fedprox", "fedvpt", my_method], seeds=3)
    print(results)
    results.plot("bars.png")

A :class:`Problem` makes a :class:`Trial` for each row and seed: a setting, the data of clients and
their tests. :func:`run` runs all rows, each as one cell, and :class:`Results` are their records.
"""

from fedprompt.compare.folder import folder as folder
from fedprompt.compare.own import problem as problem
from fedprompt.compare.problems import Problem as Problem
from fedprompt.compare.results import Results as Results
from fedprompt.compare.results import run as run

__all__ = ["Problem", "Results", "folder", "problem", "run"]
