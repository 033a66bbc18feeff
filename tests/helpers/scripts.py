"""Short sentences in scripts that tokenisers for European languages break, for tests of text in any script."""

#: Language -> sentences. "emoji" is English with sequences of several characters that are one picture.
SENTENCES = {
    "th": [
        "แมวน้ำกินปลาในทะเล",
        "วันนี้ฝนตกหนักมาก",
        "ฉันชอบดื่มน้ำส้ม",
        "เด็กๆ เล่นอยู่ในสวน",
        "ขอบคุณที่ช่วยฉันเมื่อวานนี้",
    ],
    "zh": [
        "我喜欢吃苹果。",
        "今天的天气很好!",
        "她在图书馆,我在家。",
        "请问,火车站在哪里?",
        "三个孩子在公园里玩。",
    ],
    "ja": [
        "猫が窓のそばで寝ています。",
        "今日は とても寒いですね。",
        "「ありがとう」と彼は言った。",
        "ガラスのコップを買いました。",
        "駅まで歩いて十分です。",
    ],
    "ar": [
        "ذهبَ الولدُ إلى المدرسة، ثم عاد.",
        "أحبُّ قراءةَ الكتب في المساء.",
        "هل تريدين قهوة أم شايًا؟",
        "السماء زرقاء اليوم.",
        "اشترت أمي خبزًا وحليبًا.",
    ],
    "hi": [
        "हिन्दी में एक छोटा वाक्य है।",
        "बच्चे बगीचे में खेल रहे हैं।",
        "क्या आप चाय पीना चाहते हैं?",
        "मेरी बहन दिल्ली में रहती है।",
        "कल बहुत तेज़ बारिश हुई।",
    ],
    "fa": [
        "می‌خواهم کتاب‌ها را بخوانم.",
        "بچه‌ها در باغ بازی می‌کنند.",
        "هوا امروز خیلی سرد است.",
        "آیا شما چای می‌نوشید؟",
        "خانه‌ی ما نزدیک دریاست.",
    ],
    "el": [
        "Η γάτα κοιμάται στο σπίτι.",
        "Τι ώρα φεύγει το τρένο;",
        "Μου αρέσει ο καφές, όχι το τσάι.",
        "Τα παιδιά παίζουν στον κήπο.",
        "Σήμερα βρέχει πολύ!",
    ],
    "tr": [
        "Kedi evde uyuyor, çünkü yağmur yağıyor.",
        "İstanbul'da ılık bir akşamdı.",
        "Çocuklar bahçede oynuyor.",
        "Kahve mi, çay mı istersiniz?",
        "Işıklar söndü, gün doğuyor.",
    ],
    "emoji": [
        "our family 👨‍👩‍👧‍👦 is here ❤️",
        "well done 👍🏽 my friend 🎉",
        "she is a pilot 👩🏾‍✈️ now",
        "greetings from Greece 🇬🇷 and Iran 🇮🇷",
        "a rainbow 🏳️‍🌈 after the rain 🌧️",
    ],
}
