"""Plain words for generated tasks: lower-case, common, and mostly one token each; and five categories of things.

Our own list. Knows no task and no tokenizer.
"""

from __future__ import annotations

from typing import Final


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text.split()))


CATEGORIES: Final[dict[str, tuple[str, ...]]] = {
    "animal": _words(
        """
        horse sheep tiger rabbit monkey goose whale spider eagle turtle camel donkey wolf otter parrot
        lizard beetle salmon badger pigeon dolphin hamster squirrel buffalo
        """
    ),
    "food": _words(
        """
        bread cheese butter apple onion pepper cherry soup honey pasta carrot banana pancake sausage cabbage
        walnut biscuit mustard spinach pudding lemon potato garlic melon
        """
    ),
    "tool": _words(
        """
        hammer shovel chisel wrench ladder needle scissors pliers bucket screwdriver drill axe rake crowbar
        trowel anvil saw spanner sickle brush clamp file mallet broom
        """
    ),
    "place": _words(
        """
        France Brazil Egypt Canada Norway Japan Kenya Chile Poland Turkey Vietnam Iceland Jordan Peru Sweden
        Greece Ghana Nepal Cuba Finland Portugal Ireland Austria Morocco
        """
    ),
    "weather": _words(
        """
        rain snow storm thunder fog wind hail frost drizzle lightning blizzard sunshine breeze hurricane
        tornado mist drought sleet gale heat shower rainbow cloud downpour
        """
    ),
}
"""Five kinds of things, 24 each, for made-up labels."""

LABELS: Final = _words("blick dax fep gorp tuma wug zorb kiki lorp mipen sarn vask")
"""Made-up labels; a task takes five whose first tokens differ."""

WORDS: Final = _words(
    """
    table river window garden music silver winter market letter engine bridge forest mirror button pocket
    candle summer corner valley island ticket basket travel number circle school doctor farmer sister
    brother teacher captain soldier painter singer writer driver sailor baker hunter miller paper metal
    cotton copper marble leather timber carpet curtain pillow blanket kitchen chimney ceiling cellar balcony
    fountain station harbor village castle temple palace museum theater library hospital factory office
    prison tunnel avenue square border desert canyon meadow glacier volcano waterfall planet comet galaxy
    shadow sunset morning evening midnight minute moment season century decade history future memory dream
    secret promise mistake reason answer question problem lesson chapter sentence language grammar accent
    whisper laughter silence thunderbolt signal pattern picture portrait sketch color purple yellow orange
    crimson violet scarlet golden narrow hollow gentle simple double single sudden bitter tender clever
    honest humble modest patient polite proud silent steady stubborn thirsty weary welcome wooden ancient
    broken careful distant empty famous frozen hidden lonely lucky modern nervous perfect pleasant private
    public rapid royal rural savage sacred serious severe shallow solid special strange supreme tropical
    typical urgent useful violent visible wealthy wonder worry struggle survey target tension theory thread
    throne tissue title tongue topic tower trade trail treaty trend trial tribe trick truck trunk trust
    twist uncle union unit vapor verse vessel victim victory video view virtue vision visit voice volume
    voyage wagon waste watch wave weapon weight wheel wisdom witness wound wrist yard youth zone
    """
)
"""Words for keys of tables, none twice."""

CITIES: Final = _words(
    """
    Paris London Berlin Madrid Rome Vienna Prague Dublin Lisbon Athens Cairo Lagos Nairobi Mumbai Delhi
    Tokyo Seoul Sydney Toronto Boston Chicago Denver Dallas Miami Seattle Houston Phoenix Lima Bogota Havana
    Oslo Helsinki Moscow Warsaw Budapest Zurich Geneva Milan Naples Munich
    """
)
"""Names that most tokenizers hold whole."""
