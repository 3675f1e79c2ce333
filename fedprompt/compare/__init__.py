"""Methods of the gallery, and your own, on your images under one budget.

``python -m fedprompt.compare FOLDER --vit NAME --methods fedprox,fedvpt`` reads a folder of images,
divides it over clients, runs the methods next to training alone, and writes tables and a picture.
In Python::

    from fedprompt import compare

    problem = compare.folder("photos", vit="vit_base_patch16_224", clients="dirichlet:0.3:10")
    results = compare.run(problem, ["fedprox", "fedvpt", my_method], seeds=3)
    print(results)
    results.plot("bars.png")

The modules in the order of a run: a problem (``folder``, ``own``) makes a trial for each row and
seed, which is a setting with the data and the tests of clients (``trials``). Rows are methods with
their values (``rows``, ``hyperparameters``, ``alone``). A row and a seed are a cell, which is run
(``cells``, ``measure``) and has a line in a file (``records``). Tables and pictures are made from
records alone (``tables``, ``advice``, ``pictures``, ``results``).
"""

from fedprompt.compare.folder import folder as folder
from fedprompt.compare.own import problem as problem
from fedprompt.compare.problems import Problem as Problem
from fedprompt.compare.results import Results as Results
from fedprompt.compare.results import run as run

__all__ = ["Problem", "Results", "folder", "problem", "run"]
