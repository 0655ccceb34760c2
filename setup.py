"""Metadata and build of megalite: `megalite._C` from csrc/, the folder kernels/ as `megalite.kernels`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
FLOATING_POINT = ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]


def version() -> str:
    """The version written in `megalite/__init__.py`, its only home."""
    text = (ROOT / "megalite" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise SystemExit('setup.py: megalite/__init__.py has no line __version__ = "..."')
    return found.group(1)


def packages() -> list[str]:
    """`megalite` with its subpackages, and `kernels` under the name `megalite.kernels`."""
    kernels = [f"megalite.kernels.{name}" for name in find_packages(str(ROOT / "kernels"))]
    return [*find_packages(str(ROOT), include=["megalite", "megalite.*"]), "megalite.kernels", *kernels]


def extension() -> Pybind11Extension:
    """`megalite._C` from every `csrc/*.cpp`.

    No `-march`: a wheel built on one machine must run on another, so vector code is chosen at run time.
    Apple's compiler ships without OpenMP; the code is correct, on one thread, without it.
    """
    openmp = [] if sys.platform == "darwin" else ["-fopenmp"]
    return Pybind11Extension(
        "megalite._C",
        sources=sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob("*.cpp")),
        depends=sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob("*.h*")),
        include_dirs=["csrc"],
        cxx_std=17,
        # errno and traps block vectorisation; without fused multiply-add any vector width gives the same bits
        extra_compile_args=["-O3", *FLOATING_POINT, "-Wall", "-Wextra", *openmp],
        extra_link_args=openmp,
    )


TEST = [
    # the faster engine of preprocessing, which must equal the library; on Linux it has wheels for these only
    'fastokens>=0.3.5; platform_system == "Linux" and platform_machine == "x86_64"',
    "hypothesis>=6.100",
    "mypy>=1.11",
    "pytest>=8.2",
    "pytest-xdist>=3.6",  # half of the suite waits, for other processes or for one thread
    "ruff>=0.6",
    "transformers>=4.51",  # the independent truth for Llama and GPT-2
    "types-PyYAML>=6.0",
]
DATA = ["pyarrow>=15.0", "sentencepiece>=0.2.2", "tiktoken>=0.7", "zstandard>=0.22"]
PLOT = ["matplotlib>=3.8"]
TENSORBOARD = ["tensorboard>=2.16"]

ParallelCompile("MEGALITE_BUILD_JOBS").install()

setup(
    name="megalite",
    version=version(),
    description="Megatron-style 3D-parallel training of GPT models, from CPU cores to GPU clusters",
    long_description=(
        "megalite pretrains decoder-only transformers with tensor, pipeline and data parallelism. Flags, "
        "datasets and sample order follow Megatron-LM. The numbers do not depend on the layout, and the same "
        "code runs on CPU cores with Gloo and on GPUs with NCCL."
    ),
    long_description_content_type="text/plain",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C++",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.10",
    install_requires=[
        "numpy>=1.26",
        "orjson>=3.9",
        "pyyaml>=6.0",
        "rich>=13.7",
        "tokenizers>=0.21",
        "torch>=2.11",
        'triton>=3.6; platform_system == "Linux"',
    ],
    extras_require={"data": DATA, "plot": PLOT, "tensorboard": TENSORBOARD, "test": [*TEST, *PLOT]},
    packages=packages(),
    # A top-level module "kernels" would shadow the PyPI package of that name, which other libraries import.
    package_dir={"megalite": "megalite", "megalite.kernels": "kernels"},
    package_data={"megalite": ["py.typed"]},
    ext_modules=[extension()],
    cmdclass={"build_ext": build_ext},
    zip_safe=False,
)
