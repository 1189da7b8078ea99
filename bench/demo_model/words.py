"""The words that the lessons are made of."""

from __future__ import annotations

THINGS = (
    "acorn anchor apple arrow axe bag ball banana barrel basket bean bed bell belt bench berry bike bird blanket "
    "boat  bone book boot bottle bowl box branch bread brick bridge broom brush bucket button cabin cake camera "
    "candle candy  canoe card carpet carrot castle cat chain chair chalk cheese cherry clock cloud clover coat "
    "coin comb cookie cork  corn couch crab crate crown cup curtain desk dish dog door dragon dress drum duck "
    "eagle egg engine fan farm feather  fence fern fig fish flag flute fork fox frog garden gate gem giraffe "
    "glass glove goat goose grape guitar hammer  hat hen hill honey hook horse house ice ink iron island jacket "
    "jar jelly jewel kettle key king kite kitten knife  knot ladder lake lamp leaf lemon letter lion lizard lock "
    "log map marble mask melon mill mirror mitten moon moss  mouse mug mushroom nail needle nest net nut oak oar "
    "oven owl paint pan panda paper parrot peach pear pearl pen  pencil pepper piano pie pig pillow pin pipe "
    "plant plate plum pocket pony potato puzzle quilt rabbit radio raft  rain rake ring river road rock rocket "
    "roof root rope rose ruler sack saddle sail salt sand saw scarf seed shed  sheep shell ship shirt shoe shovel "
    "silk snail snow soap sock soup spoon star stone stool stove straw sugar sun  swan sword table tea tent "
    "thread tiger toad torch towel tower toy train tray tree trunk tulip turtle umbrella vase  violin wagon wall "
    "watch water whale wheat wheel whistle window wolf wood wool yarn zebra"
).split()

COLOURS = "red blue green yellow white black brown purple orange pink grey golden silver".split()

NAMES = (
    "Ada Ben Clara Dan Ella Finn Greta Hugo Ida Jack Kim Leo Mia Nora Otto Pia Quinn Rosa Sam Tom Uma Vera Will "
    "Yara Zoe"
).split()
