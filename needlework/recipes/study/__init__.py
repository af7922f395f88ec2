"""The second study: six experiments, each one small file with its recipes, claims, metrics, thresholds and seeds.

    text.py      what is read            mixers.py   what is compared           base.py     what the recipes share
    pilot.py     E1; warm.py: again      rates.py    E2: learning rates         capacity.py E3
    forks.py     E4                      language.py E5                         reach.py    E6

Claims, metrics, margins and numbers of seeds were written here before the first run. `PRIMARY` are judged together; the rest is
exploration.
"""

from types import ModuleType

from needlework.recipes.study import capacity, forks, language, pilot, rates, reach, warm

EXPERIMENTS: dict[str, ModuleType] = {
    "pilot": pilot,
    "warm": warm,
    "rates": rates,
    "capacity": capacity,
    "forks": forks,
    "language": language,
    "reach": reach,
}
PRIMARY = capacity.CLAIMS + forks.CLAIMS + language.CLAIMS + reach.CLAIMS
EXPLORED = capacity.EXPLORED + forks.EXPLORED + language.EXPLORED + reach.EXPLORED
