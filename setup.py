"""Metadata of the package; settings of tools are in pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def read_version() -> str:
    """The version as shardwright/_version.py states it, read as text because importing the package needs torch."""
    found = re.search(r'^__version__ = "([^"]+)"$', (ROOT / "shardwright" / "_version.py").read_text(), re.MULTILINE)
    assert found is not None, 'shardwright/_version.py has no line of the form __version__ = "1.2.3"'
    return found.group(1)


EXTRAS = {
    "test": [
        *(
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "ruff>=0.12",
            "mypy>=1.15",
            "hypothesis>=6",
            "psutil",
            "setuptools>=77",
        ),
        "triton>=3.3; sys_platform == 'linux'",  # whose interpreter tests kernels where there is no GPU
        *("peft>=0.17", "deepspeed>=0.19", "datasets>=4"),  # what optional parts need, so that their tests run
    ],
    "data": ["datasets"],  # datasets of the hub, parquet and csv files
    "lora": ["peft"],
    "deepspeed": ["deepspeed"],
    "kernels": ["liger-kernel; sys_platform == 'linux'"],  # norms and gated activations in one on GPUs
    "pictures": ["matplotlib"],  # timelines as PNG
    "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.6,<10"],  # the site of scripts/docs
    "tensorboard": ["tensorboard"],
    "wandb": ["wandb"],
    "trackio": ["trackio"],
    "mlflow": ["mlflow"],
}

setup(
    name="shardwright",
    version=read_version(),
    description="Train unmodified HuggingFace transformers models over many devices",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    author="The Shardwright developers",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["shardwright", "shardwright.*"]),
    package_data={"shardwright": ["py.typed", "models/verified.json"]},
    python_requires=">=3.11",
    install_requires=["torch>=2.11", "transformers>=5.17", "safetensors>=0.5", "numpy>=1.26", "pyyaml>=6", "rich>=13"],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["shardwright = shardwright.cli.main:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
