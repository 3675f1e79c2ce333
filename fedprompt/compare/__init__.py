"""Methods of the gallery, and your own, on your images under one budget.

``fedprompt compare FOLDER --vit NAME --methods fedprox,fedvpt`` reads a folder of images, divides
it over clients, runs the methods next to training alone, and writes tables, a picture and trained
classifiers. In Python::

    from fedprompt import compare

    problem = compare.folder("photos", vit="vit_base_patch16_224", clients="dirichlet:0.3:10")
    results = compare.run(problem, ["fedprox", "fedvpt", my_method], seeds=3, out="results")
    print(results)
    model = results.classifier("FedProx")
    print(model.predict(["photos/cat/1.png"]))

The modules in the order of a run: a problem (``folder``, ``problems``) makes a trial for each row
and seed, which is a setting with the data and the tests of clients (``trials``). Rows are methods
with their values (``rows``). A row and a seed are a run (``runs``, ``measure``), and have a line in
a file (``records``). Tables and pictures are made from records and bits alone (``tables``,
``intervals``, ``pictures``, ``report``). What a run is made from has a stamp (``stamps``).
"""

from fedprompt.compare.classifier import Classifier as Classifier
from fedprompt.compare.classifier import load as load
from fedprompt.compare.folder import folder as folder
from fedprompt.compare.problems import Problem as Problem
from fedprompt.compare.problems import problem as problem
from fedprompt.compare.report import Results as Results
from fedprompt.compare.report import run as run
from fedprompt.compare.rows import Row as Row
from fedprompt.compare.trials import Trial as Trial

__all__ = ["Classifier", "Problem", "Results", "Row", "Trial", "folder", "load", "problem", "run"]
