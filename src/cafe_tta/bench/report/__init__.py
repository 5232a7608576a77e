"""The report: tables in the paper's form, figures and a page, made from the records of a benchmark."""

from cafe_tta.bench.report.make import Report, make, write

__all__ = ["Report", "make", "write"]
