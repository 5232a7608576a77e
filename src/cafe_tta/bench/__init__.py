"""The benchmark: a plan of runs, a folder of records, and a report.

    from cafe_tta import bench

    plan = bench.plan("mixed", "digits", methods=["source", "cafe", "cafe(lr=0.01)"], seeds=(0, 1))
    bench.run(plan, "results/mixed-digits")                       # stopped and called again, it goes on
    bench.report.write(bench.report.make(["results/mixed-digits"]))

`EXPERIMENTS`, `DATASETS` and `PROTOCOLS` are dictionaries that one can read, and add to.
"""

from cafe_tta.bench import rates as rates
from cafe_tta.bench import report as report
from cafe_tta.bench.experiments import DATASETS as DATASETS
from cafe_tta.bench.experiments import EXPERIMENTS as EXPERIMENTS
from cafe_tta.bench.experiments import plan as plan
from cafe_tta.bench.jobs import run as run
from cafe_tta.bench.protocols import PROTOCOLS as PROTOCOLS
from cafe_tta.bench.records import Record as Record
