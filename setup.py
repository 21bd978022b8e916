"""Packaging. Everything that varies stands in settings.ini; edit it there."""
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

root = Path(__file__).parent
parser = ConfigParser(delimiters=["="])
parser.read(root / "settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]

LICENSES = {"apache2": "Apache-2.0", "mit": "MIT", "bsd3": "BSD-3-Clause"}
STATUSES = {"1": "1 - Planning", "2": "2 - Pre-Alpha", "3": "3 - Alpha",
            "4": "4 - Beta", "5": "5 - Production/Stable"}

readme = root / "README.md"
setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=readme.read_text("utf-8") if readme.exists() else "",
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"],
    url=cfg["git_url"],
    license_expression=LICENSES[cfg["license"]],
    keywords=cfg["keywords"].split(),
    classifiers=[
        f"Development Status :: {STATUSES[cfg['status']]}",
        f"Intended Audience :: {cfg['audience']}",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=f">={cfg['min_python']}",
    packages=find_packages(include=[cfg["lib_path"], f"{cfg['lib_path']}.*"]),
    package_data={cfg["lib_path"]: ["py.typed"]},
    install_requires=cfg["requirements"].split(),
    extras_require={key.removeprefix("extra_"): value.split()
                    for key, value in cfg.items() if key.startswith("extra_")},
    entry_points={"console_scripts": cfg["console_scripts"].split()},
    zip_safe=False,
)
