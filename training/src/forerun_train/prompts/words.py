"""Words that prompts are made of."""

from __future__ import annotations

# fmt: off
CONCEPTS = (
    "gravity", "photosynthesis", "inflation", "evolution", "electricity", "democracy", "erosion",
    "friction", "magnetism", "the water cycle", "plate tectonics", "supply and demand", "entropy",
    "natural selection", "the immune system", "black holes", "probability", "recursion", "osmosis",
    "the greenhouse effect", "relativity", "vaccination", "the scientific method", "genetics",
    "supply chains", "the stock market", "machine learning", "encryption", "the solar system",
    "the periodic table", "sound waves", "refraction", "buoyancy", "fermentation", "nuclear fusion",
    "the circulatory system", "compound interest", "opportunity cost", "the ozone layer", "tides",
    "earthquakes", "volcanoes", "combustion", "digestion", "the nervous system", "hurricanes",
    "ocean currents", "pollination", "radioactivity", "semiconductors", "the internet", "taxation",
    "feudalism", "the Renaissance", "the Industrial Revolution", "the Silk Road", "colonialism",
    "the Roman Empire", "the French Revolution", "human rights", "checks and balances",
    "federalism", "game theory", "cognitive bias", "memory", "attention", "motivation",
    "habit formation", "empathy", "metaphor", "irony", "rhythm in music", "perspective in painting",
    "the golden ratio", "symmetry", "prime numbers", "fractions", "negative numbers", "averages",
    "triangles", "vectors", "limits", "open source software", "version control", "databases",
    "compilers", "operating systems", "sorting algorithms", "hash tables", "caching",
    "garbage collection", "unit testing", "latency", "batteries", "solar panels", "wind turbines",
    "recycling", "composting", "biodiversity", "migration of birds", "hibernation", "camouflage",
    "symbiosis", "food chains", "coral reefs",
)
ACTIVITIES = (
    "learn to swim", "bake bread", "write a resume", "start a garden", "save money",
    "prepare for an exam", "learn a new language", "train for a marathon", "build a bookshelf",
    "plan a wedding", "adopt a dog", "clean a kitchen", "cook rice", "fix a leaking tap",
    "change a bicycle tire", "learn to play the guitar", "make new friends", "fall asleep faster",
    "wake up earlier", "give a speech", "run a meeting", "ask for a raise", "negotiate a price",
    "write a short story", "paint a wall", "remove a coffee stain", "pack for a trip",
    "read faster", "take better photos", "grow tomatoes", "brew good coffee", "make yogurt",
    "choose a laptop", "back up my files", "set a strong password", "learn to draw", "meditate",
    "stop procrastinating", "keep a diary", "organize my desk", "host a dinner party",
    "teach a child to read", "repair a torn book", "sharpen a knife", "sew on a button",
    "knit a scarf", "train a puppy", "move to a new city", "find an apartment",
    "prepare for a job interview", "manage stress", "eat less sugar", "drink more water",
    "plan a week of meals", "learn to cook", "start a podcast", "write a thank-you note",
    "apologize to a friend", "build a birdhouse", "improve my handwriting",
)
PLACES = (
    "Paris", "Tokyo", "Cairo", "Lima", "Nairobi", "Sydney", "Toronto", "Berlin", "Rome", "Madrid",
    "Lisbon", "Oslo", "Helsinki", "Athens", "Istanbul", "Mumbai", "Bangkok", "Seoul", "Hanoi",
    "Jakarta", "Manila", "Auckland", "Santiago", "Bogota", "Havana", "Mexico City", "Chicago",
    "Boston", "Seattle", "Denver", "New Orleans", "Montreal", "Vancouver", "Dublin", "Edinburgh",
    "London", "Amsterdam", "Brussels", "Vienna", "Prague", "Budapest", "Warsaw", "Krakow", "Zagreb",
    "Marrakesh", "Tunis", "Accra", "Lagos", "Cape Town", "Zanzibar", "Kathmandu", "Reykjavik",
    "the Alps", "the Sahara", "the Amazon", "the Grand Canyon", "Patagonia", "Iceland", "Scotland",
)
JOBS = (
    "teacher", "nurse", "farmer", "baker", "librarian", "carpenter", "chef", "pilot", "plumber",
    "doctor", "lawyer", "engineer", "designer", "journalist", "photographer", "electrician",
    "tailor", "gardener", "fisherman", "firefighter", "astronaut", "musician", "painter", "poet",
    "historian", "biologist", "chemist", "geologist", "accountant", "translator", "bus driver",
    "mechanic", "software developer", "data analyst", "shop owner", "tour guide", "veterinarian",
    "dentist", "architect", "barista", "beekeeper", "blacksmith", "clockmaker", "lighthouse keeper",
    "detective",
)
ANIMALS = (
    "cat", "dog", "fox", "owl", "bear", "whale", "dolphin", "elephant", "tiger", "penguin",
    "rabbit", "turtle", "eagle", "wolf", "horse", "otter", "hedgehog", "octopus", "bee", "ant",
    "crow", "deer", "mouse", "frog", "snail", "parrot", "squirrel", "badger", "goat", "camel",
    "kangaroo", "koala", "salmon", "spider", "butterfly", "lizard", "crocodile", "giraffe", "zebra",
    "lion",
)
FOODS = (
    "pancakes", "tomato soup", "lentil curry", "apple pie", "fried rice", "a Greek salad",
    "omelettes", "vegetable stew", "chocolate cake", "banana bread", "roasted potatoes",
    "pasta with pesto", "chicken soup", "bean tacos", "pizza dough", "hummus", "carrot cake",
    "mushroom risotto", "oatmeal", "fish and chips", "dumplings", "ramen", "stuffed peppers",
    "pumpkin soup", "granola", "sourdough bread", "cheese souffle", "lemonade", "iced tea",
    "hot chocolate", "fruit salad", "scrambled eggs", "burritos", "quiche", "waffles",
    "ratatouille", "potato salad", "cornbread",
)
FEELINGS = (
    "tired", "nervous", "excited", "lonely", "proud", "confused", "bored", "grateful", "jealous",
    "overwhelmed", "hopeful", "homesick", "frustrated", "curious", "calm", "guilty", "disappointed",
    "relieved", "anxious", "inspired", "sad", "restless", "embarrassed", "optimistic", "angry",
)
EVENTS = (
    "I start a new job next week", "my best friend moved away", "I failed my driving test",
    "my sister is getting married", "I have an exam tomorrow", "I won a small prize",
    "my neighbor plays loud music", "I forgot my mother's birthday", "I have to give a talk",
    "we are moving to another country", "I lost my keys again", "my team lost the final",
    "I got a promotion", "my dog is ill", "I argued with my brother", "I am retiring this month",
    "my flight was cancelled", "I finished my first novel", "I cannot sleep at night",
    "my plants keep dying", "I was not invited to a party", "my phone broke",
    "I am learning to drive", "a colleague took credit for my work",
    "I will meet my partner's parents", "I ran my first race", "I adopted a kitten",
    "my computer is slow", "I want to change careers", "it has rained all week",
)
THINGS = (
    "books", "movies", "board games", "songs", "podcasts", "museums", "hobbies", "vegetables",
    "fruits", "birds", "trees", "flowers", "sports", "musical instruments", "inventions",
    "countries", "rivers", "mountains", "islands", "planets", "dinosaurs", "insects", "fish",
    "spices", "cheeses", "breads", "drinks", "desserts", "tools", "vehicles", "jobs", "gifts",
    "holidays", "festivals", "dances", "fabrics", "metals", "gemstones", "languages",
    "programming languages", "algorithms", "scientists", "painters", "composers", "explorers",
    "rulers", "buildings", "bridges", "cities", "habits", "virtues", "questions for an interview",
    "ways to save energy", "ways to relax",
)
PURPOSES = (
    "a rainy afternoon", "a beginner", "a family with small children", "a long train ride",
    "a small apartment", "someone on a tight budget", "a birthday party", "a first date",
    "a school project", "a weekend at home", "an elderly neighbor", "a team at work",
    "a summer holiday", "cold winter evenings", "a curious ten-year-old", "a busy student",
    "a camping trip", "a picnic", "a quiet Sunday", "a class of thirty pupils",
)
FORMS = (
    "short story", "poem", "haiku", "limerick", "letter", "diary entry", "news article",
    "blog post", "speech", "dialogue", "song", "fable", "fairy tale", "product description",
    "advertisement", "movie review", "book review", "recipe", "travel guide", "riddle", "monologue",
    "essay", "bedtime story", "postcard", "toast", "obituary for a fictional person",
    "short biography", "science fiction scene", "detective story", "ghost story",
)
TONES = (
    "funny", "serious", "sad", "cheerful", "formal", "casual", "dramatic", "mysterious", "romantic",
    "sarcastic", "hopeful", "nostalgic", "poetic", "plain", "enthusiastic", "gentle", "angry",
    "old-fashioned", "childlike", "matter-of-fact",
)
LISTENERS = (
    "a five-year-old", "a teenager", "my grandmother", "a beginner", "an expert in another field",
    "a high school student", "a busy manager", "a tourist", "a class of pupils", "a new colleague",
    "a friend who dislikes maths", "a curious child", "a journalist", "a farmer", "an artist",
)
OBJECTS = (
    "an old clock", "a lost letter", "a red umbrella", "a wooden boat", "a broken mirror", "a key",
    "a talking tree", "a forgotten song", "a paper crane", "a silver ring", "a map", "a lantern",
    "an empty house", "a train at midnight", "a storm", "a library", "a lighthouse", "a bakery",
    "a robot", "a garden", "a river", "a mountain village", "a spaceship", "a violin", "a snowman",
    "a market", "a bridge", "a secret door", "a photograph", "a teapot", "a kite", "the sea",
    "the moon", "autumn", "the first day of school", "a long journey", "a new neighbor",
    "a promise",
)
PEOPLE = (
    "Anna", "Ben", "Carlos", "Dana", "Elif", "Farid", "Grace", "Hiro", "Ines", "Jonas", "Kavya",
    "Leo", "Mina", "Noor", "Oskar", "Priya", "Quentin", "Rosa", "Samuel", "Tara", "Umar", "Vera",
    "Wei", "Ximena", "Yusuf", "Zoe", "Amara", "Bruno", "Chloe", "Diego", "Esther", "Felix",
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)
LANGUAGES = ("French", "Spanish", "German", "Italian", "Portuguese", "Dutch", "Swedish")
# fmt: on
