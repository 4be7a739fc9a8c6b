# ruff: noqa: E501, the width of a line depends on the script
"""A paragraph in each of several languages, and a generator of distinct documents from its sentences."""

import random

PARAGRAPHS = {
    "en": "The river flows past the old house. In the evening the neighbours sit at the gate and listen to stories "
    "about distant cities. Early in the morning the train arrives at the station.",
    "ru": "Река течёт мимо старого дома. Вечером соседи сидят у ворот и слушают рассказы о далёких городах. Рано утром "
    "поезд приходит на станцию.",
    "ar": "يجري النهر بجانب البيت القديم. في المساء يجلس الجيران عند الباب ويستمعون إلى قصص عن مدن بعيدة. في الصباح "
    "الباكر يصل القطار إلى المحطة.",
    "hi": "नदी पुराने घर के पास से बहती है। शाम को पड़ोसी दरवाज़े पर बैठते हैं और दूर के शहरों की कहानियाँ सुनते हैं। सुबह "
    "जल्दी रेलगाड़ी स्टेशन पर पहुँचती है।",
    "ko": "강은 오래된 집 옆으로 흐른다. 저녁이면 이웃들이 대문 앞에 앉아 먼 도시의 이야기를 듣는다. 이른 아침에 기차가 역에 도착한다.",
    "zh": "河水从老房子旁边流过。晚上邻居们坐在门前，听远方城市的故事。第二天早上，火车到站了。",
    "ja": "川は古い家のそばを流れている。夕方になると近所の人々が門の前に座り、遠い町の話を聞く。朝早く、列車が駅に着く。",
    "th": "แม่น้ำไหลผ่านบ้านเก่า ตอนเย็นเพื่อนบ้านนั่งที่ประตูและฟังเรื่องราวของเมืองที่อยู่ไกล เช้าตรู่รถไฟมาถึงสถานี",
    "km": "ទន្លេហូរកាត់ផ្ទះចាស់។ នៅពេលល្ងាចអ្នកជិតខាងអង្គុយនៅមាត់ទ្វារហើយស្តាប់រឿងអំពីទីក្រុងឆ្ងាយ។ ព្រលឹមរថភ្លើងមកដល់ស្ថានីយ៍។",
    "lo": "ແມ່ນ້ຳໄຫຼຜ່ານເຮືອນເກົ່າ. ຕອນແລງເພື່ອນບ້ານນັ່ງຢູ່ປະຕູແລະຟັງເລື່ອງຂອງເມືອງທີ່ຢູ່ໄກ. ຕອນເຊົ້າລົດໄຟມາຮອດສະຖານີ.",
    "my": "မြစ်သည်အိမ်ဟောင်းဘေးမှစီးဆင်းသည်။ ညနေတွင်အိမ်နီးချင်းများသည်တံခါးဝတွင်ထိုင်ပြီးဝေးလံသောမြို့များအကြောင်းနားထောင်ကြသည်။ နံနက်စောစောတွင်ရထားဘူတာသို့ရောက်သည်။",
    "bo": "ཆུ་བོ་ནི་ཁང་པ་རྙིང་པའི་འགྲམ་ནས་བཞུར། དགོང་མོར་ཁྱིམ་མཚེས་རྣམས་སྒོ་འགྲམ་དུ་བསྡད་ནས་རྒྱང་རིང་གི་གྲོང་ཁྱེར་གྱི་སྒྲུང་ཉན། ཞོགས་པ་སྔ་པོར་མེ་འཁོར་འབབ་ཚུགས་སུ་སླེབས།",
}
WITHOUT_SPACES = ("zh", "ja", "th", "km", "lo", "my", "bo")


def document(language: str, seed: int, num_words: int) -> str:
    """Return a text of about `num_words` words of a language: its words in random order, with its punctuation."""
    from data_prep.words import split_words

    rng = random.Random(f"{language} {seed}")
    words = split_words(PARAGRAPHS[language])
    space = "" if language in WITHOUT_SPACES else " "
    lines = [space.join(rng.choices(words, k=20)) for _ in range(-(-num_words // 20))]
    return "\n".join(lines)
