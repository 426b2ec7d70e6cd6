"""Words for keys and word lists: everyday ones from the lists below, then pronounceable ones.

The benchmark takes its words from a package. These lists are our own, so that nothing is needed.
"""

from random import Random

_ADJECTIVE_LIST = """
able aged alert ample amber ancient arctic autumn awake azure bare basic bitter blank bleak blue
blunt bold bright brisk broad broken brown busy calm careful cheap cheerful chief chilly civil
clean clear clever close cloudy coarse cold common cool copper cosy crimson crisp curious curly
damp dark dear deep dense distant double dry dull dusty eager early earnest eastern easy elder
empty equal even exact faint fair faithful famous fancy fast fertile fierce final firm flat fluffy
foreign frail free fresh friendly frosty full funny gentle giant glad global golden grand grateful
green grey handy happy hard harsh hasty heavy hidden high hollow honest hot huge humble humid
hungry icy ideal inner ivory jolly keen kind large late lazy lean light little lively local lonely
long loose loud lovely loyal lucky lunar main major marble mellow merry mighty mild minor misty
modern modest narrow near neat new noble noisy normal northern odd old olive open orange outer
oval pale patient peaceful perfect pink plain poor popular precious pretty prime private proud
public pure purple quick quiet rapid rare ready real red regular rich ripe rough round royal rusty
safe salty scarlet secret serious shallow sharp shiny short shy silent silver simple single sleepy
slim slow small smart smooth snowy sober soft solar solid sour southern spare special spicy square
stable steady steep stern sticky stiff still stormy strange strict strong sturdy sudden sunny
sweet swift tall tame tender thick thin tidy tight tiny tired tough tranquil true usual vague vast
velvet violet vital vivid warm wary weary western wet white whole wide wild windy wise wooden
yellow young
"""

_NOUN_LIST = """
acorn actor airport album alley almond anchor animal ankle apple apron arch arm army arrow artist
attic aunt author baby badge baker balcony ball balloon bamboo bank banner barn barrel basin
basket bath beach bean bear beard bed bee bell belt bench berry bicycle bird biscuit blanket
blossom board boat body bone bonnet book boot border bottle bowl box boy bracelet branch bread
breeze brick bridge broom brother brush bubble bucket builder bull bus butter button cabin cable
cactus cage cake calendar camel camera camp canal candle canoe canvas captain car card carpet
carrot cart castle cat cathedral cave ceiling cellar chain chair chalk channel cheese cherry chest
chicken chimney choir church cinema circle circus city clay cliff clock cloth cloud clover coach
coast coat coffee coin collar comet cook coral corn corner cottage cotton cousin cow cradle crane
crayon creek crow crown cup cupboard curtain cushion dancer daughter deer desert desk diamond
dinner doctor dog doll dolphin donkey door dove dragon drawer dress driver drum duck eagle ear
engine evening eye fabric farmer feather fence ferry field finger fire fish flag flame flask flood
floor flour flower flute fog forest fork fountain fox frog fruit garden garlic gate giraffe girl
glass glove goat grape grass guest guitar hall hammer hand harbor hat hawk head heart hedge helmet
hill honey hook horn horse hospital hotel house hut ink insect iron island jacket jar jewel
journal judge juice jungle kettle key kitchen kite kitten knee knife ladder lady lake lamb lamp
lantern lawyer leaf lemon letter library lighthouse lily lion lizard lobster lock lunch magnet map
market mask meadow melon milk mill mirror monkey moon morning mountain mouse museum mushroom music
nail napkin neck needle nest net night nose nurse oak oar ocean office onion orchard orchestra
otter oven owl ox page painter palace palm pan paper parcel park parrot path peach pear pebble pen
pencil pepper piano picture pig pigeon pillow pilot pine pipe planet plate plum pocket poem pond
pony poppy porch port prince pumpkin puppy puzzle rabbit radio raft rail rain raven ribbon rice
ring river road robin rocket roof room root rope rose ruler sail salad salt sand saucer scarf
school scissors seal seat seed shadow sheep shelf shell ship shirt shoe shop shore shovel sister
skirt sky sled snail snake snow soap sock sofa soldier soup spade sparrow spider spoon spring
stable stair star station statue stone storm stove street student sugar suitcase summer swan table
tailor tea teacher temple tent theatre thread throne thumb ticket tiger tool towel tower town toy
tractor train tree trumpet trunk tulip tunnel turtle uncle valley vase village violin wagon waiter
wall walnut wave well whale wheat wheel whistle window wing winter wolf wood wool
"""

_ADJECTIVES, _NOUNS = _ADJECTIVE_LIST.split(), _NOUN_LIST.split()
_EVERYDAY = sorted({*_ADJECTIVES, *_NOUNS})
_SYLLABLES = [consonant + vowel for consonant in "bdfghjklmnprstvz" for vowel in "aeiou"]
_INVENTED = len(_SYLLABLES) ** 3
_STRIDE = 104_729  # a prime that does not divide _INVENTED: neighbours look nothing alike


def draw_key(rng: Random) -> str:
    """A key as the benchmark's are: an adjective and a noun."""
    return f"{rng.choice(_ADJECTIVES)}-{rng.choice(_NOUNS)}"


def draw_words(rng: Random, count: int) -> list[str]:
    """So many distinct words: everyday ones, and made-up ones where there are not enough."""
    if count > len(_EVERYDAY) + _INVENTED:
        raise ValueError(f"there are not {count:,} words to draw from")
    pool = range(max(len(_EVERYDAY), count))
    return [_word(place) for place in rng.sample(pool, count)]


def _word(place: int) -> str:
    """After the everyday words come those of three open syllables, which none of them is."""
    if place < len(_EVERYDAY):
        return _EVERYDAY[place]
    spelling = (place - len(_EVERYDAY)) * _STRIDE % _INVENTED
    letters = ""
    for _ in range(3):
        spelling, syllable = divmod(spelling, len(_SYLLABLES))
        letters += _SYLLABLES[syllable]
    return letters
